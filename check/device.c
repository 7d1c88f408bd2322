/* SPDX-License-Identifier: Apache-2.0 */
#include "check/device.h"

#include <stdio.h>
#include <stdlib.h>

#if WEFT_HAVE_CUDA
#include <cuda_runtime_api.h>

/* The error is returned as a sentence and must not be found by a later call. */
static const char *text_of(cudaError_t error)
{
    if (error == cudaSuccess) return NULL;
    (void)cudaGetLastError();
    return cudaGetErrorString(error);
}

int device_built(void)
{
    return 1;
}

const char *device_architectures(void)
{
    return WEFT_BUILT_ARCHITECTURES;
}

int device_count(void)
{
    int count = 0;
    return text_of(cudaGetDeviceCount(&count)) ? 0 : count;
}

void device_versions(char *text, size_t size)
{
    int driver = 0, runtime = 0;
    (void)text_of(cudaDriverGetVersion(&driver));
    (void)text_of(cudaRuntimeGetVersion(&runtime));
    if (driver)
        snprintf(text, size, "driver for CUDA %d.%d, runtime %d.%d", driver / 1000, driver % 100 / 10,
                 runtime / 1000, runtime % 100 / 10);
    else
        snprintf(text, size, "no driver, runtime %d.%d", runtime / 1000, runtime % 100 / 10);
}

int device_facts_of(int device, device_facts *facts)
{
    struct cudaDeviceProp p;
    *facts = (device_facts){.name = ""};
    if (text_of(cudaGetDeviceProperties(&p, device))) return 0;
    snprintf(facts->name, sizeof facts->name, "%s", p.name);
    facts->major = p.major;
    facts->minor = p.minor;
    facts->sms = p.multiProcessorCount;
    facts->memory = p.totalGlobalMem;
    facts->l2 = (size_t)p.l2CacheSize;
    return 1;
}

void *device_alloc(size_t bytes)
{
    void *p = NULL;
    return text_of(cudaMalloc(&p, bytes ? bytes : 1)) ? NULL : p;
}

void device_free(void *p)
{
    if (p) (void)text_of(cudaFree(p));
}

size_t device_room(void)
{
    size_t room = 0, total = 0;
    return text_of(cudaMemGetInfo(&room, &total)) ? 0 : room;
}

/* A copy or a fill may return before it is done; work on other streams must not begin before that. */
static const char *finish(cudaError_t error)
{
    const char *wrong = text_of(error);
    return wrong ? wrong : text_of(cudaStreamSynchronize(NULL));
}

const char *device_put(void *to, const void *from, size_t bytes)
{
    return finish(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}

const char *device_get(void *to, const void *from, size_t bytes)
{
    return text_of(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

const char *device_copy(void *to, const void *from, size_t bytes)
{
    return finish(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
}

const char *device_fill(void *to, int byte, size_t bytes)
{
    return finish(cudaMemset(to, byte, bytes));
}

const char *device_wait(void)
{
    return text_of(cudaDeviceSynchronize());
}

void *device_pinned(size_t bytes)
{
    void *p = NULL;
    return text_of(cudaMallocHost(&p, bytes ? bytes : 1)) ? NULL : p;
}

void device_pinned_free(void *p)
{
    if (p) (void)text_of(cudaFreeHost(p));
}

const char *device_put_later(void *to, const void *from, size_t bytes)
{
    return text_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, NULL));
}

const char *device_fill_later(void *to, int byte, size_t bytes)
{
    return text_of(cudaMemsetAsync(to, byte, bytes, NULL));
}

const char *device_use(int device)
{
    return text_of(cudaSetDevice(device));
}

/* ---- time ------------------------------------------------------------------------------------------------------- */

struct device_timer {
    cudaStream_t stream;
    cudaEvent_t start, stop;
    cudaGraphExec_t graph;
    void *evict;
    size_t evict_bytes;
    const char *(*read)(void *context);
    void *context;
};

device_timer *device_timer_open(size_t evict_bytes)
{
    device_timer *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->evict_bytes = evict_bytes;
    if (!text_of(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking)) &&
        !text_of(cudaEventCreate(&t->start)) && !text_of(cudaEventCreate(&t->stop)) &&
        (t->evict = device_alloc(evict_bytes)))
        return t;
    device_timer_close(t);
    return NULL;
}

static void drop_graph(device_timer *t)
{
    if (t->graph) (void)text_of(cudaGraphExecDestroy(t->graph));
    t->graph = NULL;
}

void device_timer_close(device_timer *t)
{
    if (!t) return;
    drop_graph(t);
    device_free(t->evict);
    if (t->start) (void)text_of(cudaEventDestroy(t->start));
    if (t->stop) (void)text_of(cudaEventDestroy(t->stop));
    if (t->stream) (void)text_of(cudaStreamDestroy(t->stream));
    free(t);
}

void *device_timer_stream(const device_timer *t)
{
    return t->stream;
}

void device_timer_reader(device_timer *t, const char *(*read)(void *context), void *context)
{
    t->read = read;
    t->context = context;
}

void *device_timer_buffer(const device_timer *t)
{
    return t->evict;
}

static const char *evict_all(device_timer *t)
{
    const char *wrong = text_of(cudaMemsetAsync(t->evict, 0x5a, t->evict_bytes, t->stream));
    return wrong || !t->read ? wrong : t->read(t->context);
}

const char *device_timer_capture(device_timer *t, const char *(*call)(void *context), void *context, int times)
{
    cudaGraph_t graph = NULL;
    drop_graph(t);
    const char *wrong = text_of(cudaStreamBeginCapture(t->stream, cudaStreamCaptureModeGlobal));
    if (wrong) return wrong;
    for (int i = 0; i < times && !wrong; i++) wrong = call(context);
    /* The capture has to be ended whatever happened in it. */
    const char *end = text_of(cudaStreamEndCapture(t->stream, &graph));
    if (!wrong) wrong = end;
    if (!wrong) wrong = text_of(cudaGraphInstantiateWithFlags(&t->graph, graph, 0));
    if (graph) (void)text_of(cudaGraphDestroy(graph));
    return wrong;
}

/* The device is busy with the eviction while the rest is put on the stream, so that it never waits for the host. */
const char *device_timer_run(device_timer *t, int replays, int evict, double *seconds)
{
    float ms = 0;
    const char *wrong = NULL;
    if (evict) wrong = evict_all(t);
    if (!wrong) wrong = text_of(cudaEventRecord(t->start, t->stream));
    for (int i = 0; i < replays && !wrong; i++) wrong = text_of(cudaGraphLaunch(t->graph, t->stream));
    if (!wrong) wrong = text_of(cudaEventRecord(t->stop, t->stream));
    if (!wrong) wrong = text_of(cudaEventSynchronize(t->stop));
    if (!wrong) wrong = text_of(cudaEventElapsedTime(&ms, t->start, t->stop));
    *seconds = 1e-3 * (double)ms;
    return wrong;
}

const char *device_timer_copy(device_timer *t, void *to, const void *from, size_t bytes, double *seconds)
{
    float ms = 0;
    const char *wrong = evict_all(t);
    if (!wrong) wrong = text_of(cudaEventRecord(t->start, t->stream));
    if (!wrong) wrong = text_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, t->stream));
    if (!wrong) wrong = text_of(cudaEventRecord(t->stop, t->stream));
    if (!wrong) wrong = text_of(cudaEventSynchronize(t->stop));
    if (!wrong) wrong = text_of(cudaEventElapsedTime(&ms, t->start, t->stop));
    *seconds = 1e-3 * (double)ms;
    return wrong;
}

#else

static const char *const none = "this build has no CUDA backend";

int device_built(void)
{
    return 0;
}

const char *device_architectures(void)
{
    return "";
}

int device_count(void)
{
    return 0;
}

void device_versions(char *text, size_t size)
{
    snprintf(text, size, "none");
}

int device_facts_of(int device, device_facts *facts)
{
    (void)device;
    *facts = (device_facts){.name = ""};
    return 0;
}

void *device_alloc(size_t bytes)
{
    (void)bytes;
    return NULL;
}

void device_free(void *p)
{
    (void)p;
}

size_t device_room(void)
{
    return 0;
}

const char *device_put(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return none;
}

const char *device_get(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return none;
}

const char *device_copy(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return none;
}

const char *device_fill(void *to, int byte, size_t bytes)
{
    (void)to, (void)byte, (void)bytes;
    return none;
}

const char *device_wait(void)
{
    return none;
}

void *device_pinned(size_t bytes)
{
    (void)bytes;
    return NULL;
}

void device_pinned_free(void *p)
{
    (void)p;
}

const char *device_put_later(void *to, const void *from, size_t bytes)
{
    (void)to, (void)from, (void)bytes;
    return none;
}

const char *device_fill_later(void *to, int byte, size_t bytes)
{
    (void)to, (void)byte, (void)bytes;
    return none;
}

const char *device_use(int device)
{
    (void)device;
    return none;
}

void device_timer_reader(device_timer *t, const char *(*read)(void *context), void *context)
{
    (void)t, (void)read, (void)context;
}

void *device_timer_buffer(const device_timer *t)
{
    (void)t;
    return NULL;
}

device_timer *device_timer_open(size_t evict_bytes)
{
    (void)evict_bytes;
    return NULL;
}

void device_timer_close(device_timer *t)
{
    (void)t;
}

void *device_timer_stream(const device_timer *t)
{
    (void)t;
    return NULL;
}

const char *device_timer_capture(device_timer *t, const char *(*call)(void *context), void *context, int times)
{
    (void)t, (void)call, (void)context, (void)times;
    return none;
}

const char *device_timer_run(device_timer *t, int replays, int evict, double *seconds)
{
    (void)t, (void)replays, (void)evict, (void)seconds;
    return none;
}

const char *device_timer_copy(device_timer *t, void *to, const void *from, size_t bytes, double *seconds)
{
    (void)t, (void)to, (void)from, (void)bytes, (void)seconds;
    return none;
}

#endif
