// One token from the logits of one row.
#pragma once

#include <cstdint>
#include <vector>

#include "abi.h"

namespace tokenmill {

// Memory that a thread uses again for each row it draws; `reserve` first, so that drawing allocates nothing.
struct SampleScratch {
    std::vector<float> weights;     // [vocabulary]
    std::vector<float> maxima;      // of blocks of logits
    std::vector<float> candidates;  // logits or weights among which a limit is looked for
    std::vector<double> masses;     // by the upper bits of weights

    void reserve(int64_t vocab_size);
};

// The id that row `row` of `sampling` takes, -1 if its logits are not numbers. The row alone decides on every operation.
int64_t sample_row(const TmSampling& sampling, int64_t row, SampleScratch& scratch);

}  // namespace tokenmill
