// A hint for the loop that follows: its iterations may run side by side, as no store of one is read by another.
#pragma once

#if defined(__clang__)
#define DTCOMM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DTCOMM_INDEPENDENT _Pragma("GCC ivdep")
#endif
