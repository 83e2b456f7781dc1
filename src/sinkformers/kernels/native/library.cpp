// The C interface: picks the instruction set, keeps the workspace, and distributes heads over threads.
#include "kernels.h"
#include "sanitize.h"
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
static int omp_get_num_threads() { return 1; }
#endif
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

// The kernels for one instruction set: [0] float, [1] double.
struct Kernels {
    const AttentionKernels *attention[2];
    const OperatorKernels *matrices[2];
};
#define INSTRUCTION_SET(name)                                                    \
    namespace name {                                                             \
    extern const AttentionKernels attention_of_float, attention_of_double;       \
    extern const OperatorKernels operator_of_float, operator_of_double;          \
    static const Kernels kernels = {{&attention_of_float, &attention_of_double}, \
                                    {&operator_of_float, &operator_of_double}};  \
    }
INSTRUCTION_SET(baseline)
#ifdef __x86_64__
INSTRUCTION_SET(avx2)
INSTRUCTION_SET(avx512)
#endif
#ifdef HAVE_AVX512_BF16
namespace avx512_bf16 {
extern const AttentionKernels attention_of_float;
}
#endif

namespace {
int best_level() {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
#ifdef HAVE_AVX512_BF16
        if (__builtin_cpu_supports("avx512bf16")) return 3;
#endif
        return 2;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}
std::atomic<int> level{best_level()};
const Kernels &chosen() {
#ifdef __x86_64__
    if (level >= 2) return avx512::kernels;
    if (level == 1) return avx2::kernels;
#endif
    return baseline::kernels;
}

// The kernels of a call: those with products in bfloat16 where it admits them.
const AttentionKernels &attention_kernels([[maybe_unused]] const AttentionArguments &args, bool is_double) {
#ifdef HAVE_AVX512_BF16
    const bool plain = !args.block && !args.max_products && !args.l2;
    if (level == 3 && args.half && plain && args.scale > 0) return avx512_bf16::attention_of_float;
#endif
    return *chosen().attention[is_double];
}

// Fresh pages cost more than the passes do, so one workspace is kept between calls. A caller that finds it taken, by
// another thread or by a thread that was lost in a fork, works in memory of its own.
std::mutex taken;
char *kept = nullptr;
size_t kept_bytes = 0;
const pid_t loaded_by = getpid();

char *allocate(size_t bytes) {
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return (char *)p;
}
void give_back(char *p, size_t bytes) {
    allow(p, bytes);
    munmap(p, bytes);
}
struct Workspace {
    char *base;
    size_t bytes;
    bool shared;
    explicit Workspace(size_t wanted)
        : bytes((wanted + (2 << 20) - 1) / (2 << 20) * (2 << 20)), shared(taken.try_lock()) {
        if (!shared) base = allocate(bytes);
        else {
            if (kept_bytes < bytes) {
                if (kept) give_back(kept, kept_bytes);
                kept = allocate(bytes);
                kept_bytes = kept ? bytes : 0;
            }
            base = kept;
        }
        if (base) forbid(base, shared ? kept_bytes : bytes);
    }
    ~Workspace() {
        if (shared) taken.unlock();
        else if (base) give_back(base, bytes);
    }
};

void wait_for_team() {
#pragma omp barrier
}
struct Counter {
    std::atomic<int64_t> at;
    int64_t end;
};
int64_t take_next(void *queue) {
    Counter &counter = *(Counter *)queue;
    const int64_t at = counter.at.fetch_add(1);
    return at < counter.end ? at : -1;
}
struct Sequence {
    int64_t at, end;
};
int64_t step_next(void *queue) {
    Sequence &sequence = *(Sequence *)queue;
    return sequence.at < sequence.end ? sequence.at++ : -1;
}

// Without OpenMP there is one thread, and no team survives a fork.
int team_size([[maybe_unused]] int64_t wanted) {
#ifdef _OPENMP
    return getpid() == loaded_by ? (int)std::max<int64_t>(1, wanted) : 1;
#else
    return 1;
#endif
}

// What a call returns; `binding.py` reads it.
enum Outcome { ALL_SAFE, NO_MEMORY, SOME_UNSAFE };

// Items are distributed over threads one by one, each with a workspace of its own; what is left over a team shares.
struct Plan {
    int64_t items, alone; // the first `alone` of the items are distributed
    size_t alone_bytes, team_bytes;
    bool backward;
    int64_t alone_stored, team_stored; // rows of a matrix to keep
    int threads;
};
template <class Arguments>
int deal(const Plan &plan, const Arguments &args, void (*work)(const Arguments &, const Share &)) {
    Workspace workspace(
        std::max(plan.alone ? plan.alone_bytes * plan.threads : 0, plan.alone < plan.items ? plan.team_bytes : 0));
    if (!workspace.base) return NO_MEMORY;
    Counter counter{{0}, plan.alone};
#pragma omp parallel num_threads(plan.threads) if (plan.threads > 1)
    {
        const int id = omp_get_thread_num(), size = omp_get_num_threads();
        if (plan.alone)
            work(args, {0, 1, plan.backward, plan.alone_stored, workspace.base + id * plan.alone_bytes, nullptr,
                        take_next, &counter});
        if (plan.alone < plan.items) {
#pragma omp barrier
            Sequence rest{plan.alone, plan.items};
            work(args, {id, size, plan.backward, plan.team_stored, workspace.base, wait_for_team, step_next, &rest});
        }
    }
    return 0;
}
int outcome(const uint8_t *safe, int64_t count) {
    return std::find(safe, safe + count, 0) == safe + count ? ALL_SAFE : SOME_UNSAFE;
}
int64_t whole_rounds(int64_t items, int threads) { return threads == 1 ? items : items / threads * threads; }

int attention(const AttentionArguments &args, bool is_double, bool backward) {
    const AttentionKernels &use = attention_kernels(args, is_double);
    const int threads = team_size(args.threads);
    const int64_t items = Order(args, backward).items();
    const size_t row = (size_t)args.m * (is_double ? 8 : 4), matrix = args.n * row, room = (size_t)args.workspace;
    const int64_t alone = matrix * threads <= room ? whole_rounds(items, threads) : 0;
    const int64_t stored = std::min<int64_t>(args.n, room / row);
    if (args.block) { // rows come in order, so that each head has one thread
        const size_t each = use.bytes(args, 1, backward, args.block);
        const int failed = deal({items, items, each, 0, backward, args.block, 0, threads}, args, use.heads);
        return failed ? failed : outcome(args.safe, args.batch * args.heads);
    }
    const int failed = deal({items, alone, use.bytes(args, 1, backward, args.n),
                             use.bytes(args, threads, backward, stored), backward, args.n, stored, threads},
                            args, use.heads);
    return failed ? failed : outcome(args.safe, args.batch * args.heads);
}
// Small matrices in the lanes of vectors, where there are enough of them for all lanes of all threads. `saves`: whether
// the state is written and read.
int normalize_in_lanes(const OperatorArguments &args, bool is_double, bool backward, bool saves) {
    const OperatorKernels &use = *chosen().matrices[is_double];
    const int64_t portion = portion_of(args), portions = (args.batch + portion - 1) / portion;
    const size_t bytes = use.lane_bytes(args, backward, saves);
    const int failed = deal({portions, portions, bytes, 0, backward, 0, 0, team_size(args.threads)}, args,
                            saves ? use.lanes : use.lanes_alone);
    return failed ? failed : outcome(args.safe, args.batch);
}
bool fills_lanes(const OperatorArguments &args, const OperatorKernels &use, int threads) {
    return std::max(args.n, args.m) <= SMALL && args.batch >= (int64_t)use.lane_count * threads &&
           args.n_iters <= MOST_STEPS && !args.row_weight && !args.col_target;
}
int normalize(const OperatorArguments &args, bool is_double, bool backward) {
    const OperatorKernels &use = *chosen().matrices[is_double];
    const int threads = team_size(args.threads);
    if (fills_lanes(args, use, threads)) return normalize_in_lanes(args, is_double, backward, true);
    const int failed = deal({args.batch, whole_rounds(args.batch, threads), use.bytes(args, 1, backward),
                             use.bytes(args, threads, backward), backward, 0, 0, threads},
                            args, use.matrices);
    return failed ? failed : outcome(args.safe, args.batch);
}
} // namespace

extern "C" {
EXPORT int sinkformers_attention_forward(const AttentionArguments *args, int is_double) {
    return attention(*args, is_double, false);
}
EXPORT int sinkformers_attention_backward(const AttentionArguments *args, int is_double) {
    return attention(*args, is_double, true);
}
EXPORT int sinkformers_operator_forward(const OperatorArguments *args, int is_double) {
    return normalize(*args, is_double, false);
}
EXPORT int sinkformers_operator_backward(const OperatorArguments *args, int is_double) {
    return normalize(*args, is_double, true);
}
EXPORT int sinkformers_tiny_forward(const OperatorArguments *args, int is_double) {
    return normalize_in_lanes(*args, is_double, false, false);
}
EXPORT int sinkformers_tiny_backward(const OperatorArguments *args, int is_double) {
    return normalize_in_lanes(*args, is_double, true, false);
}
// What the binding reads before it calls anything: the interface number, raised with every change of a field's meaning,
// the fields of the structures with their kinds, their sizes, and the constants that are compiled in.
EXPORT int sinkformers_interface() { return 8; }
#define STATE_INT(name) "int " #name "\n"
#define STATE_REAL(name) "real " #name "\n"
#define STATE_BITS(name) "bits " #name "\n"
#define STATE_STRIDED(name) "strided " #name "\n"
#define STATE_DATA(name) "data " #name "\n"
#define STATE_BYTES(name) "data " #name "\n"
EXPORT const char *sinkformers_structure(int which) {
    return which ? OPERATOR_FIELDS(STATE_INT, STATE_REAL, STATE_BITS, STATE_STRIDED, STATE_DATA, STATE_BYTES)
                 : ATTENTION_FIELDS(STATE_INT, STATE_REAL, STATE_BITS, STATE_STRIDED, STATE_DATA, STATE_BYTES);
}
EXPORT int sinkformers_size(int which) { return which ? sizeof(OperatorArguments) : sizeof(AttentionArguments); }
EXPORT double sinkformers_smallest_exponent(int is_double) { return chosen().attention[is_double]->smallest_exponent; }
// Whether calls are distributed over threads.
EXPORT int sinkformers_threaded() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
EXPORT int sinkformers_level() { return level; }
EXPORT int sinkformers_set_level(int wanted) { return level = wanted < best_level() ? wanted : best_level(); }
EXPORT void sinkformers_release() {
    if (!taken.try_lock()) return;
    if (kept) give_back(kept, kept_bytes);
    kept = nullptr;
    kept_bytes = 0;
    taken.unlock();
}
}
