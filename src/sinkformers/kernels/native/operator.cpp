// The operator alone, for one instruction set and one type of numbers, compiled as attention.cpp is.
#include "operator.h"
#include "kernels.h"
#include "tiny.h"

namespace ISA {
static size_t bytes(const OperatorArguments &args, int size, bool backward) {
    return Matrix<NUMBER>::bytes(args, size, backward);
}
static void matrices(const OperatorArguments &args, const Share &share) {
    const Team team{share.id, share.size, share.wait};
    if (share.backward) {
        MatrixBackward<NUMBER> matrix(args, team, share.workspace);
        for (int64_t at; (at = share.next(share.queue)) >= 0;) matrix.run(at);
    } else {
        MatrixForward<NUMBER> matrix(args, team, share.workspace);
        for (int64_t at; (at = share.next(share.queue)) >= 0;) matrix.run(at);
    }
}
static size_t tiny_bytes(const OperatorArguments &args) { return Lanes<NUMBER, 0, 0>::bytes(args); }
template <int N, int M> static void tiny_groups(const OperatorArguments &args, const Share &share) {
    Lanes<NUMBER, N, M> lanes(args, share.workspace);
    for (int64_t at; (at = share.next(share.queue)) >= 0;) {
        const int64_t end = std::min<int64_t>(args.batch, (at + 1) * TINY_PORTION);
        for (int64_t first = at * TINY_PORTION; first < end; first += LANES<NUMBER>) {
            const int count = (int)std::min<int64_t>(LANES<NUMBER>, end - first);
            if (share.backward) lanes.backward(first, count);
            else lanes.forward(first, count);
        }
    }
}
static void tiny_matrices(const OperatorArguments &args, const Share &share) {
    if (args.n == 4 && args.m == 4) return tiny_groups<4, 4>(args, share);
    tiny_groups<0, 0>(args, share);
}
extern const OperatorKernels KERNELS(operator) = {bytes, matrices, tiny_bytes, tiny_matrices};
} // namespace ISA
