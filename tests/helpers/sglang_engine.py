"""What SGLang's engine generates, for tests of several files."""

GREEDY = {"temperature": 0, "ignore_eos": True}


def generate(engine, inputs, tokens: int = 6, drafts: bool = False) -> tuple[list, list]:
    """([(prompt, generated tokens, their log-probabilities)], all that SGLang says). drafts: the engine verifies some,
    and is not asked for log-probabilities: None stands for them."""
    sampling = {"max_new_tokens": tokens, **GREEDY}
    outputs = engine.generate(input_ids=inputs, sampling_params=sampling, return_logprob=not drafts)
    results = []
    for ids, output in zip(inputs, outputs, strict=True):
        said = None if drafts else [one for one, *_ in output["meta_info"]["output_token_logprobs"]]
        results.append((ids, output["output_ids"], said))
    return results, outputs
