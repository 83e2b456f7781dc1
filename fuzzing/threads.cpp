// Eight threads that call the kernels at once, for ThreadSanitizer: each must get to the bit what one thread alone
// gets. Built without OpenMP, whose synchronisation the sanitizer does not know; `threads <library>`.
#include "arguments.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <random>
#include <thread>
#include <vector>

template <class Arguments> using Kernel = int (*)(const Arguments *, int);
static Kernel<AttentionArguments> attention_forward, attention_backward;
static Kernel<OperatorArguments> operator_forward, operator_backward, tiny_forward, tiny_backward;
static void (*release)();

// Everything a problem writes, in one vector to compare.
template <class T> struct Problem {
    std::mt19937 random;
    std::vector<std::vector<T>> inputs;
    std::vector<std::vector<T>> results;
    explicit Problem(int seed) : random(seed) {
        // Pointers into them must stay.
        inputs.reserve(16);
        results.reserve(16);
    }
    int size(int most) { return 1 + (int)(random() % most); }
    T *given(size_t count) {
        std::normal_distribution<T> normal;
        inputs.emplace_back(count);
        for (T &x : inputs.back()) x = normal(random);
        return inputs.back().data();
    }
    T *result(size_t count) {
        results.emplace_back(count);
        return results.back().data();
    }
};

template <class T> static std::vector<std::vector<T>> attention(int seed) {
    Problem<T> p(seed);
    const bool to_the_limit = seed % 3 == 0, causal = seed % 3 == 1;
    const int64_t heads = p.size(3), n = p.size(40), m = causal ? n : p.size(40), d = p.size(20), e = p.size(20),
                  steps = to_the_limit ? 2
                          : causal     ? 1 + 2 * p.size(2)
                                       : p.size(6);
    std::vector<uint8_t> keys(heads * m, 1), safe(heads);
    for (uint8_t &key : keys) key = p.random() % 4 != 0;
    AttentionArguments args{};
    args.batch = 1, args.heads = heads, args.n = n, args.m = m, args.d = d, args.e = e, args.n_iters = steps,
    args.threads = 1;
    args.workspace = seed % 2 ? 64 << 20 : 0;
    args.scale = 0.5;
    args.half = sizeof(T) == 4 && seed % 4 == 1;
    args.safe_product = sizeof(T) == 4 ? 1e30 : 1e280;
    args.query = {p.given(heads * n * d), 0, n * d, d, 0};
    args.key = {p.given(heads * m * d), 0, m * d, d, 0};
    args.value = {p.given(heads * m * e), 0, m * e, e, 0};
    args.keys = {keys.data(), 0, m, 1, 0};
    args.d_out = {p.given(heads * n * e), 0, n * e, e, 0};
    args.out = p.result(heads * n * e);
    args.u = p.result(heads * ((steps + 1) / 2) * n);
    args.s = p.result(heads * (steps / 2) * m);
    args.r = p.result(heads * n);
    args.safe = safe.data();
    args.d_query = p.result(heads * n * d);
    args.d_key = p.result(heads * m * d);
    args.d_value = p.result(heads * m * e);
    args.d_tau = p.result(heads);
    if (to_the_limit) {
        args.max_products = 1000, args.tol = 1e-4;
        args.lift = p.result(heads * m);
        args.residual = p.result(heads);
        args.products = p.result(heads);
    }
    if (causal) {
        args.block = std::min<int64_t>(n, 16), args.triangle = 1;
        const int64_t entries = heads * (steps / 2) * m;
        args.starts = p.result(entries * ((n + args.block - 1) / args.block));
        args.received_after = p.result(entries);
        args.expected_after = p.result(heads * m);
    }
    if (attention_forward(&args, sizeof(T) == 8) || attention_backward(&args, sizeof(T) == 8)) std::abort();
    return p.results;
}

template <class T> static std::vector<std::vector<T>> normalize(int seed) {
    Problem<T> p(seed);
    const bool tiny = seed % 2;
    const int64_t batch = p.size(tiny       ? 700
                                 : seed % 4 ? 3
                                            : 40),
                  n = p.size(tiny ? 6 : 40), m = p.size(tiny ? 6 : 40), steps = p.size(6);
    std::vector<uint8_t> safe(batch);
    OperatorArguments args{};
    args.batch = batch, args.n = n, args.m = m, args.n_iters = steps, args.threads = 1;
    args.safe_product = sizeof(T) == 4 ? 1e30 : 1e280;
    args.scores = p.given(batch * n * m);
    args.d_weights = p.given(batch * n * m);
    args.weights = p.result(batch * n * m);
    args.u = p.result(batch * ((steps + 1) / 2) * n);
    args.s = p.result(batch * (steps / 2) * m);
    args.r = p.result(batch * n);
    args.safe = safe.data();
    args.d_scores = p.result(batch * n * m);
    args.d_tau = p.result(batch);
    if ((tiny ? tiny_forward : operator_forward)(&args, sizeof(T) == 8)) std::abort();
    if ((tiny ? tiny_backward : operator_backward)(&args, sizeof(T) == 8)) std::abort();
    return p.results;
}

template <class T> static std::vector<std::vector<T>> both(int seed) {
    auto results = attention<T>(seed);
    for (auto &part : normalize<T>(seed)) results.push_back(part);
    return results;
}

int main(int count, char **words) {
    void *library = dlopen(count > 1 ? words[1] : "", RTLD_NOW);
    if (!library) return std::fprintf(stderr, "threads: the library is not there: %s\n", dlerror()), 2;
    auto find = [&](auto &to, const char *name) { to = (std::decay_t<decltype(to)>)dlsym(library, name); };
    find(attention_forward, "sinkformers_attention_forward");
    find(attention_backward, "sinkformers_attention_backward");
    find(operator_forward, "sinkformers_operator_forward");
    find(operator_backward, "sinkformers_operator_backward");
    find(tiny_forward, "sinkformers_tiny_forward");
    find(tiny_backward, "sinkformers_tiny_backward");
    find(release, "sinkformers_release");
    constexpr int PROBLEMS = 12, THREADS = 8, ROUNDS = 20;
    std::vector<std::vector<std::vector<float>>> floats;
    std::vector<std::vector<std::vector<double>>> doubles;
    for (int seed = 0; seed < PROBLEMS; seed++) {
        floats.push_back(both<float>(seed));
        doubles.push_back(both<double>(seed));
    }
    std::vector<std::thread> threads;
    std::vector<int> wrong(THREADS);
    for (int t = 0; t < THREADS; t++)
        threads.emplace_back([&, t] {
            for (int round = 0; round < ROUNDS; round++) {
                const int seed = (t + round) % PROBLEMS;
                wrong[t] += both<float>(seed) != floats[seed];
                wrong[t] += both<double>(seed) != doubles[seed];
                if (round % 5 == t % 5) release();
            }
        });
    for (auto &thread : threads) thread.join();
    int bad = 0;
    for (int each : wrong) bad += each;
    std::printf("%d threads, %d problems each, %d differ from one thread alone\n", THREADS, 2 * ROUNDS, bad);
    return bad ? 1 : 0;
}
