// All kernels for one instruction set. The build compiles this file once per set, with ISA and VECTOR_BYTES defined.
#include "attention_backward.h"
#include "attention_forward.h"
#include "causal.h"
#include "kernels.h"
#include "limit.h"
#include "operator.h"
#include "tiny.h"

namespace ISA {
template <class T>
static size_t attention_bytes(const AttentionArguments &args, int size, bool backward, int64_t stored) {
    return Head<T>::bytes(args, size, backward, stored);
}
template <class T> static void attention_heads(const AttentionArguments &args, const Share &share) {
    const Team team{share.id, share.size, share.wait};
    const auto every_head = [&](auto &&head) {
        for (int64_t item; (item = share.next(share.queue)) >= 0;)
            for (int64_t place = 0; place < head.order.each(); place++) head.run(item, place);
    };
    if (args.block > 0) {
        if (share.backward) every_head(CausalBackward<T>(args, team, true, share.stored, share.workspace));
        else every_head(CausalForward<T>(args, team, false, share.stored, share.workspace));
    } else if (args.max_products > 0) {
        if (share.backward) every_head(LimitBackward<T>(args, team, true, share.stored, share.workspace));
        else every_head(LimitForward<T>(args, team, false, share.stored, share.workspace));
    } else if (share.backward) every_head(Backward<T>(args, team, true, share.stored, share.workspace));
    else every_head(Forward<T>(args, team, false, share.stored, share.workspace));
}
template <class T> static size_t operator_bytes(const OperatorArguments &args, int size, bool backward) {
    return Matrix<T>::bytes(args, size, backward);
}
template <class T> static void operator_matrices(const OperatorArguments &args, const Share &share) {
    const Team team{share.id, share.size, share.wait};
    if (share.backward) {
        MatrixBackward<T> matrix(args, team, share.workspace);
        for (int64_t at; (at = share.next(share.queue)) >= 0;) matrix.run(at);
    } else {
        MatrixForward<T> matrix(args, team, share.workspace);
        for (int64_t at; (at = share.next(share.queue)) >= 0;) matrix.run(at);
    }
}
template <class T> static size_t tiny_bytes(const OperatorArguments &args) { return Lanes<T, 0, 0>::bytes(args); }
template <class T, int N, int M> static void tiny_groups(const OperatorArguments &args, const Share &share) {
    Lanes<T, N, M> lanes(args, share.workspace);
    for (int64_t at; (at = share.next(share.queue)) >= 0;) {
        const int64_t end = std::min<int64_t>(args.batch, (at + 1) * TINY_PORTION);
        for (int64_t first = at * TINY_PORTION; first < end; first += LANES<T>) {
            const int count = (int)std::min<int64_t>(LANES<T>, end - first);
            if (share.backward) lanes.backward(first, count);
            else lanes.forward(first, count);
        }
    }
}
template <class T> static void tiny_matrices(const OperatorArguments &args, const Share &share) {
    if (args.n == 4 && args.m == 4) return tiny_groups<T, 4, 4>(args, share);
    tiny_groups<T, 0, 0>(args, share);
}
extern const Kernels kernels = {
    {SMALLEST_EXPONENT<float>, SMALLEST_EXPONENT<double>}, {attention_bytes<float>, attention_bytes<double>},
    {attention_heads<float>, attention_heads<double>},     {operator_bytes<float>, operator_bytes<double>},
    {operator_matrices<float>, operator_matrices<double>}, {tiny_bytes<float>, tiny_bytes<double>},
    {tiny_matrices<float>, tiny_matrices<double>},
};
} // namespace ISA
