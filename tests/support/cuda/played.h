// What a CUDA kernel of one file needs, on a processor: a block's threads are threads of the system.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__ static inline
#define __shared__ static

using std::max;
using std::min;

struct Place { int x, y, z; };
static thread_local Place threadIdx, blockIdx;
static Place gridDim;
static std::unique_ptr<std::barrier<>> of_block;
static std::vector<std::unique_ptr<std::barrier<>>> of_warps;
static float shuffled[1024];

static inline void __syncthreads() { of_block->arrive_and_wait(); }

static inline float __shfl_xor_sync(unsigned, float value, int step) {
    auto& warp = *of_warps[threadIdx.x / 32];
    shuffled[threadIdx.x] = value;
    warp.arrive_and_wait();
    const float other = shuffled[threadIdx.x ^ step];
    warp.arrive_and_wait();
    return other;
}

static inline float __uint_as_float(unsigned x) { float f; std::memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; std::memcpy(&x, &f, 4); return x; }

template <class Kernel>
static void launch(Place grid, int threads, Kernel kernel) {
    gridDim = grid;
    of_block = std::make_unique<std::barrier<>>(threads);
    of_warps.clear();
    for (int first = 0; first < threads; first += 32) {
        of_warps.push_back(std::make_unique<std::barrier<>>(min(32, threads - first)));
    }
    std::vector<std::thread> block;
    for (int x = 0; x < threads; ++x) {
        block.emplace_back([=] {
            threadIdx = {x, 0, 0};
            for (int b = 0; b < grid.x * grid.y * grid.z; ++b) {
                blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
                kernel();
                of_block->arrive_and_wait();  // the next block has the same shared memory
            }
        });
    }
    for (auto& thread : block) thread.join();
}
