// What an instruction set offers to the library around it.
#pragma once
#include "arguments.h"
#include <algorithm>
#include <cstddef>

// A member's part in a call: who it is, its team's workspace, and where the next head comes from.
struct Share {
    int id, size;
    bool backward;
    int64_t stored; // rows of a head's kernel that the team may keep
    char *workspace;
    void (*wait)();
    int64_t (*next)(void *queue);
    void *queue;
};
// The order in which heads are computed. Heads whose gradients of the bias are added up belong to one item, which one
// team computes; heads that share a mask follow each other.
struct Order {
    int64_t batch, heads;
    bool over_batch, over_heads; // the gradient of the bias is a sum over these
    bool by_head;                // the samples of the first head first
    Order(const AttentionArguments &args, bool backward) : batch(args.batch), heads(args.heads) {
        const bool summed = backward && args.d_bias.data;
        over_batch = summed && !args.d_bias.b;
        over_heads = summed && !args.d_bias.h;
        by_head = repeats(args.bias) || repeats(args.entries);
    }
    static bool repeats(const Strided &t) { return t.data && !t.b && t.h; }
    int64_t items() const { return (over_batch ? 1 : batch) * (over_heads ? 1 : heads); }
    int64_t each() const { return batch * heads / items(); }
    int64_t head(int64_t item, int64_t place) const {
        if (over_batch && !over_heads) return place * heads + item;
        if (over_heads && !over_batch) return item * heads + place;
        const int64_t at = item + place; // one of them is zero
        return by_head ? at % batch * heads + at / batch : at;
    }
};
// Matrices up to SMALL × SMALL can be computed a matrix in each lane. They are distributed in portions of about 8192
// entries, and of 16 matrices at least, which are the lanes of the widest vectors.
// With more steps than MOST_STEPS their vectors would take more memory than the matrices.
constexpr int SMALL = 64, MOST_STEPS = 64;
inline int64_t portion_of(const OperatorArguments &args) {
    return std::max<int64_t>(1, 512 / std::max<int64_t>(1, args.n * args.m)) * 16;
}

struct AttentionKernels {
    double smallest_exponent;
    size_t (*bytes)(const AttentionArguments &, int size, bool backward, int64_t stored);
    void (*heads)(const AttentionArguments &, const Share &);
};
struct OperatorKernels {
    int lane_count;
    size_t (*bytes)(const OperatorArguments &, int size, bool backward);
    void (*matrices)(const OperatorArguments &, const Share &);
    size_t (*lane_bytes)(const OperatorArguments &, bool backward, bool saves);
    void (*lanes)(const OperatorArguments &, const Share &);
    void (*lanes_alone)(const OperatorArguments &, const Share &); // nothing is saved
};
// What a file for one instruction set and one type of numbers offers: attention_of_float, operator_of_double, …
#define JOIN(kind, number) kind##_of_##number
#define JOIN_EXPANDED(kind, number) JOIN(kind, number)
#define KERNELS(kind) JOIN_EXPANDED(kind, NUMBER)
