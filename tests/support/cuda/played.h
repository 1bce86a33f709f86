// What a CUDA kernel of one file needs, on a processor: a block's threads take turns in one of the
// system's, each until it has to wait for others. The headers of C++ take longer to compile than a
// kernel does.
#include <ucontext.h>

#define __global__
#define __device__ static inline
#define __shared__ static

extern "C" float exp2f(float);

template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }

enum { MOST_THREADS = 512, WARP = 32, STACK_BYTES = 64 * 1024 };

struct Place { int x, y, z; };
static Place threadIdx, blockIdx, gridDim;
static float shuffled[MOST_THREADS];

struct Thread {
    ucontext_t context;
    bool is_over;
    alignas(16) char stack[STACK_BYTES];
};
static Thread of_block[MOST_THREADS];
static ucontext_t scheduler;

static inline void yield_to_others() {
    const int own = threadIdx.x;
    swapcontext(&of_block[own].context, &scheduler);
}

struct Barrier {
    int threads, there;
    unsigned round;

    void wait() {
        const unsigned own = round;
        if (++there == threads) {
            there = 0;
            ++round;
        }
        while (round == own) yield_to_others();
    }
};
static Barrier all, of_warps[MOST_THREADS / WARP];

static inline void __syncthreads() { all.wait(); }

static inline float __shfl_xor_sync(unsigned, float value, int step) {
    Barrier& warp = of_warps[threadIdx.x / WARP];
    shuffled[threadIdx.x] = value;
    warp.wait();
    const float other = shuffled[threadIdx.x ^ step];
    warp.wait();
    return other;
}

static inline float __uint_as_float(unsigned x) { float f; __builtin_memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; __builtin_memcpy(&x, &f, 4); return x; }

static void (*call)(const void* kernel);
static const void* called;

static void run_thread() {
    call(called);
    of_block[threadIdx.x].is_over = true;
}

template <class Kernel> static void launch(Place grid, int threads, Kernel kernel) {
    gridDim = grid;
    called = &kernel;
    call = [](const void* one) { (*static_cast<const Kernel*>(one))(); };
    all = {threads, 0, 0};
    for (int first = 0; first < threads; first += WARP) {
        of_warps[first / WARP] = {min<int>(WARP, threads - first), 0, 0};
    }
    for (int b = 0; b < grid.x * grid.y * grid.z; ++b) {
        blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        for (int x = 0; x < threads; ++x) {
            Thread& one = of_block[x];
            one.is_over = false;
            getcontext(&one.context);
            one.context.uc_stack.ss_sp = one.stack;
            one.context.uc_stack.ss_size = STACK_BYTES;
            one.context.uc_link = &scheduler;
            makecontext(&one.context, run_thread, 0);
        }
        for (int left = threads; left;) {
            for (int x = 0; x < threads; ++x) {
                if (of_block[x].is_over) continue;
                threadIdx = {x, 0, 0};
                swapcontext(&scheduler, &of_block[x].context);
                left -= of_block[x].is_over;
            }
        }
    }
}
