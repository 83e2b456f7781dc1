// Attention with products in bfloat16, for processors that have instructions for them.
#define PRODUCTS_IN_PAIRS
#include "attention_backward.h"
#include "attention_forward.h"

namespace ISA {
static size_t attention_bytes(const AttentionArguments &args, int size, bool backward, int64_t stored) {
    return Head<float>::bytes(args, size, backward, stored);
}
static void attention_heads(const AttentionArguments &args, const Share &share) {
    const Team team{share.id, share.size, share.wait};
    const auto every_head = [&](auto &&head) {
        for (int64_t item; (item = share.next(share.queue)) >= 0;)
            for (int64_t place = 0; place < head.order.each(); place++) head.run(item, place);
    };
    if (share.backward) every_head(Backward<float>(args, team, true, share.stored, share.workspace));
    else every_head(Forward<float>(args, team, false, share.stored, share.workspace));
}
extern const HalfKernels half_kernels = {attention_bytes, attention_heads};
} // namespace ISA
