/*
 * Stands in for the CUDA libraries where there is no GPU, so that ONNX Runtime's real CUDA
 * provider can be watched at work. Device memory is host memory, a copy copies, and a kernel
 * launch is told to the listener and skipped: no value that comes out means anything.
 *
 * Here is only what our models make the provider call. stub.py generates every other function
 * that it links to, as one that tells the listener "unknown" and fails.
 */
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#define UNUSED __attribute__((unused))

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, CAPTURE_UNSUPPORTED = 900 }; /* cudaError */

static void (*listener)(const char *kind, const char *name, size_t bytes);

void stub_listen(void (*new_listener)(const char *, const char *, size_t)) {
    listener = new_listener;
}
int stub_tell(const char *kind, const char *name, size_t bytes) {
    if (listener) listener(kind, name, bytes);
    return OK;
}

/* Streams, graphs and the handles of cuBLAS: having an address is all they do. */
int stub_create(void **object) {
    *object = calloc(1, 64);
    return *object ? OK : OUT_OF_MEMORY;
}
int stub_destroy(void *object) {
    free(object);
    return OK;
}

static int set(int *value, int number) {
    *value = number;
    return OK;
}

/* ---- the device: one H200 under a driver for CUDA 13.0 ---- */

static const size_t MEMORY_BYTES = (size_t)140 << 30;

int cuDriverGetVersion(int *version) { return set(version, 13000); }
int cudaGetDeviceCount(int *count) { return set(count, 1); }
int cudaGetDevice(int *device) { return set(device, 0); }
int cudaSetDevice(int device) { return device == 0 ? OK : INVALID_VALUE; }

int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = MEMORY_BYTES;
    return OK;
}

/* By the offsets of cudaDeviceProp in CUDA 13, which has 1008 bytes; the rest reads as zero. */
int cudaGetDeviceProperties(char *properties, int device UNUSED) {
    static const struct {
        int offset, value;
    } FIELDS[] = {
        {308, 32},         /* warpSize */
        {320, 1024},       /* maxThreadsPerBlock */
        {336, 2147483647}, /* maxGridSize: x, y, z */
        {340, 65535},
        {344, 65535},
        {360, 9},          /* major */
        {364, 0},          /* minor */
        {384, 132},        /* multiProcessorCount */
        {604, 2048},       /* maxThreadsPerMultiProcessor */
        {624, 228 << 10},  /* sharedMemPerMultiprocessor */
        {672, 227 << 10},  /* sharedMemPerBlockOptin */
    };
    memset(properties, 0, 1008);
    strcpy(properties, "stand-in");
    memcpy(properties + 288, &MEMORY_BYTES, sizeof MEMORY_BYTES); /* totalGlobalMem */
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++)
        memcpy(properties + FIELDS[i].offset, &FIELDS[i].value, sizeof(int));
    return OK;
}

/* ---- capture: calls that wait for the device are refused, as the real runtime does ---- */

static void *capturing;

static int refused(const char *call) {
    if (!capturing) return OK;
    stub_tell("refused", call, 0);
    return CAPTURE_UNSUPPORTED;
}
const char *cudaGetErrorName(int error) { return error ? "error of the stand-in" : "success"; }
const char *cudaGetErrorString(int error) { return cudaGetErrorName(error); }
int cudaGetLastError(void) { return OK; }

int cudaStreamSynchronize(void *stream) {
    stub_tell("sync", __func__, (size_t)stream); /* which one, in place of bytes */
    return refused(__func__);
}
int cudaDeviceSynchronize(void) { return refused(__func__); }

int cudaStreamBeginCapture(void *stream, int mode UNUSED) {
    capturing = stream;
    return stub_tell("graph", "begin", 0);
}
int cudaStreamEndCapture(void *stream UNUSED, void **graph) {
    capturing = NULL;
    stub_tell("graph", "end", 0);
    return stub_create(graph);
}
int cudaGraphInstantiate(void **executable, void *graph UNUSED, unsigned long long flags UNUSED) {
    return stub_create(executable);
}
int cudaGraphLaunch(void *executable, void *stream UNUSED) {
    return stub_tell("graph", "launch", (size_t)executable); /* which one, in place of bytes */
}

/* ---- memory ---- */

int cudaMalloc(void **memory, size_t bytes) {
    if (refused(__func__)) return CAPTURE_UNSUPPORTED;
    *memory = aligned_alloc(256, bytes / 256 * 256 + 256);
    if (!*memory) return OUT_OF_MEMORY;
    memset(*memory, 0, bytes);
    return stub_tell("take", __func__, malloc_usable_size(*memory));
}
int cudaFree(void *memory) {
    if (refused(__func__)) return CAPTURE_UNSUPPORTED;
    stub_tell("give", __func__, malloc_usable_size(memory));
    return stub_destroy(memory);
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream UNUSED) {
    static const char *const KINDS[] = {"H2H", "H2D", "D2H", "D2D", "default"};
    memmove(to, from, bytes);
    return stub_tell("copy", KINDS[kind], bytes);
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    return refused(__func__) ? CAPTURE_UNSUPPORTED : cudaMemcpyAsync(to, from, bytes, kind, NULL);
}

/* ---- kernels: known by the address of a host function, whose name is given once ---- */

enum { SLOTS = 1 << 17 };
static struct {
    const void *function;
    const char *name;
} kernels[SLOTS];

static size_t slot_of(const void *function) {
    size_t slot = ((size_t)function >> 4) % SLOTS;
    while (kernels[slot].function && kernels[slot].function != function) slot = (slot + 1) % SLOTS;
    return slot;
}
void __cudaRegisterFunction(void **module UNUSED, const void *function, char *device UNUSED,
                            const char *name) {
    size_t slot = slot_of(function);
    kernels[slot].function = function;
    kernels[slot].name = name;
}
int __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return OK;
}
int __cudaLaunchKernel(const void *kernel) {
    const char *name = kernels[slot_of(kernel)].name;
    return stub_tell("kernel", name ? name : "without a name", 0);
}
int cudaLaunchKernel(const void *kernel) { return __cudaLaunchKernel(kernel); }
