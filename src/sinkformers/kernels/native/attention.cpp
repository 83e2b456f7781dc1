// Attention for one instruction set and one type of numbers: the build compiles this file once for each, with ISA,
// VECTOR_BYTES and NUMBER defined; and once with PRODUCTS_IN_PAIRS, for processors that have instructions for products
// in bfloat16.
#include "attention_backward.h"
#include "attention_forward.h"
#include "kernels.h"
#ifndef PRODUCTS_IN_PAIRS
#include "causal.h"
#include "limit.h"
#endif

namespace ISA {
static size_t bytes(const AttentionArguments &args, int size, bool backward, int64_t stored) {
    return Head<NUMBER>::bytes(args, size, backward, stored);
}
template <class Kind> static void every_head(const AttentionArguments &args, const Share &share) {
    Kind head(args, Team{share.id, share.size, share.wait}, share.backward, share.stored, share.workspace);
    for (int64_t item; (item = share.next(share.queue)) >= 0;)
        for (int64_t place = 0; place < head.order.each(); place++) head.run(item, place);
}
static void heads(const AttentionArguments &args, const Share &share) {
#ifndef PRODUCTS_IN_PAIRS
    if (args.block > 0) {
        if (share.backward) every_head<CausalBackward<NUMBER>>(args, share);
        else every_head<CausalForward<NUMBER>>(args, share);
        return;
    }
    if (args.max_products > 0) {
        if (share.backward) every_head<LimitBackward<NUMBER>>(args, share);
        else every_head<LimitForward<NUMBER>>(args, share);
        return;
    }
#endif
    if (share.backward) every_head<Backward<NUMBER>>(args, share);
    else every_head<Forward<NUMBER>>(args, share);
}
extern const AttentionKernels KERNELS(attention) = {SMALLEST_EXPONENT<NUMBER>, bytes, heads};
} // namespace ISA
