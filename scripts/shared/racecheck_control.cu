// What racecheck says of a word handed from warp to warp through mbarriers, where we know the answer.
// Built and run by scripts/sanitize.py --control. Argument: a Way, by number.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

enum Way {
  ONE_LANE = 0,    // the reading warp arrives once, by an elected lane after __syncwarp: correct
  EVERY_LANE = 1,  // each lane of the reading warp arrives: correct
  NO_WAIT = 2,     // each lane arrives and the writer does not wait for it: a race
};
constexpr int USES = 4, LANES = 32;

__device__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ unsigned address(void *shared) { return __cvta_generic_to_shared(shared); }

__device__ void wait(unsigned barrier) {
  asm volatile(
      "{.reg .pred done; AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%0], 0; @!done bra AGAIN; }" ::"r"(barrier)
      : "memory");
}

__device__ bool elected() {
  unsigned chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen;
}

__global__ void hand_over(int way, int *sums) {
  // A barrier for each use: a writer that does not wait cannot end a phase twice, for which the reader would wait for ever.
  __shared__ unsigned long long full[USES], empty[USES];
  __shared__ int word;
  int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  if (threadIdx.x == 0) {
    for (int use = 0; use < USES; use++) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(&full[use])));
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&empty[use])), "r"(way == ONE_LANE ? 1 : LANES));
    }
  }
  __syncthreads();
  int sum = 0;
  for (int use = 0; use < USES; use++) {
    if (warp == 0) {
      if (use && way != NO_WAIT) wait(address(&empty[use - 1]));
      if (lane == 0) {
        word = use;
        arrive(address(&full[use]));
      }
      __syncwarp();
    } else {
      wait(address(&full[use]));
      sum += word;
      __syncwarp();
      if (way != ONE_LANE || elected()) arrive(address(&empty[use]));
      __syncwarp();
    }
  }
  if (warp == 1) sums[lane] = sum;
}

int main(int, char **arguments) {
  int *sums;
  cudaMalloc(&sums, LANES * sizeof(int));
  hand_over<<<1, 2 * LANES>>>(atoi(arguments[1]), sums);
  if (cudaDeviceSynchronize() == cudaSuccess) std::puts("case ran");
}
