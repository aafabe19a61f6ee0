"""Attention's gradients with respect to q, k, v, sink and bias, through o and lse.

With S = scale * Q K^T + bias, P = exp(S - lse') (lse' includes the sink), O = P V, and dO, dlse the gradients of o and
lse:

    dV = P^T dO          dP = dO V^T          delta = rowsum(dO * O) - dlse * exp(lse' - lse)
    dS = P * (dP - delta)                     dbias = dS, summed over what the bias was broadcast along
    dQ = scale * dS K    dK = scale * dS^T Q  dsink[h] = - sum over rows of exp(sink - lse') * rowsum(dO * O)

A KV head's gradients are sums over its query heads. Rows and keys that nobody sees have a gradient of zero.

``ops``: torch's operator and autograd. ``problem``: which gradients are requested. ``reference``: the definition in
FP32. Kernels: ``device`` has what both architectures share, ``sm90`` and ``sm100`` the main kernels.
"""
