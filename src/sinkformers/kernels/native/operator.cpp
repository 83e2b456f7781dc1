// The operator alone, for one instruction set and one type of numbers, compiled as attention.cpp is.
#include "operator.h"
#include "kernels.h"
#include "small.h"
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
// A size with kernels of its own.
typedef TinyMatrices<NUMBER, 4, 4> Four;
static bool is_four(const OperatorArguments &args) { return args.n == 4 && args.m == 4; }
static size_t lane_bytes(const OperatorArguments &args, bool backward, bool saves) {
    return is_four(args) && !saves ? Four::bytes(args) : SmallMatrices<NUMBER>::bytes(args, backward, saves);
}
template <class Group> static void groups(Group &&group, const OperatorArguments &args, const Share &share) {
    const int64_t portion = portion_of(args);
    for (int64_t at; (at = share.next(share.queue)) >= 0;) {
        const int64_t end = std::min<int64_t>(args.batch, (at + 1) * portion);
        for (int64_t first = at * portion; first < end; first += LANES<NUMBER>) {
            const int count = (int)std::min<int64_t>(LANES<NUMBER>, end - first);
            if (share.backward) group.backward(first, count);
            else group.forward(first, count);
        }
    }
}
static void lanes_alone(const OperatorArguments &args, const Share &share) {
    if (is_four(args)) groups(Four(args, share.workspace), args, share);
    else groups(SmallMatrices<NUMBER>(args, share.backward, false, share.workspace), args, share);
}
static void lanes(const OperatorArguments &args, const Share &share) {
    groups(SmallMatrices<NUMBER>(args, share.backward, true, share.workspace), args, share);
}
extern const OperatorKernels KERNELS(operator) = {LANES<NUMBER>, bytes, matrices, lane_bytes, lanes, lanes_alone};
} // namespace ISA
