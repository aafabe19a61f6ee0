// What racecheck says of a word handed from warp to warp through mbarriers, where we know the answer.
// Built and run by scripts/sanitize.py --control. Argument: a Way, by number.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

enum Way {
  ONE_LANE = 0,    // the reading warp arrives once, by an elected lane behind __syncwarp: correct
  EVERY_LANE = 1,  // each lane of the reading warp arrives: correct
  NO_WAIT = 2,     // each lane arrives and the writer does not wait for it: a race
};
constexpr int USES = 4, LANES = 32;

__device__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void wait(unsigned barrier, int parity) {
  asm volatile(
      "{.reg .pred done; AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra AGAIN; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ bool elected() {
  unsigned chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen;
}

__global__ void hand_over(int way, int *sums) {
  __shared__ unsigned long long full, empty;
  __shared__ int word;
  unsigned full_address = __cvta_generic_to_shared(&full), empty_address = __cvta_generic_to_shared(&empty);
  int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full_address));
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(empty_address), "r"(way == ONE_LANE ? 1 : LANES));
  }
  __syncthreads();
  int sum = 0;
  for (int use = 0; use < USES; use++) {
    if (warp == 0) {
      if (use && way != NO_WAIT) wait(empty_address, (use - 1) % 2);
      if (lane == 0) {
        word = use;
        arrive(full_address);
      }
      __syncwarp();
    } else {
      wait(full_address, use % 2);
      sum += word;
      __syncwarp();
      if (way != ONE_LANE || elected()) arrive(empty_address);
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
