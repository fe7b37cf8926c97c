// Calls an XLA FFI handler the way XLA does, with a call frame made by hand. XLA for CPU never runs the
// `initialize` stage, and nothing runs the `execute` stage of a CUDA handler where there is no GPU.
//
// Built with the FFI headers of the installed jaxlib, which are later than those of the handlers, as in use.

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#define MAX_BUFFERS 16
#define MAX_ATTRIBUTES 8

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  char* message;
};

struct XLA_FFI_ExecutionContext {
  uint64_t stream;
  int stream_fails;
};

static XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) {
  XLA_FFI_Error* error = malloc(sizeof(*error));
  if (error == NULL) {
    abort();
  }
  error->code = args->errc;
  error->message = strdup(args->message);
  return error;
}

static void get_message(XLA_FFI_Error_GetMessage_Args* args) { args->message = args->error->message; }

static void destroy_error(XLA_FFI_Error_Destroy_Args* args) {
  free(args->error->message);
  free(args->error);
}

static XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  if (args->ctx->stream_fails) {
    XLA_FFI_Error_Create_Args error = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, "no stream here",
                                       XLA_FFI_Error_Code_UNIMPLEMENTED};
    return create_error(&error);
  }
  args->stream = (void*)args->ctx->stream;
  return NULL;
}

static XLA_FFI_Api make_api(void) {
  XLA_FFI_Api api;
  memset(&api, 0, sizeof(api));
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = create_error;
  api.XLA_FFI_Error_GetMessage = get_message;
  api.XLA_FFI_Error_Destroy = destroy_error;
  api.XLA_FFI_Stream_Get = get_stream;
  return api;
}

// Moves an error into `text`; returns its code, or 0.
static int take_error(XLA_FFI_Error* error, char* text, size_t text_size) {
  if (error == NULL) {
    return 0;
  }
  const int code = (int)error->code;
  snprintf(text, text_size, "%s", error->message);
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  destroy_error(&args);
  return code;
}

typedef struct FrameBuffer {
  int32_t dtype;
  int32_t rank;
  int64_t dims[4];
  uint64_t data;
} FrameBuffer;

typedef struct FrameAttribute {
  const char* name;
  int32_t dtype;     // XLA_FFI_DataType of a scalar; 0: a string
  bool boolean;      // value of a PRED
  int32_t int32;     // value of an S32
  int64_t int64;     // value of an S64
  const char* text;  // value of a string
} FrameAttribute;

static void fill_buffer(XLA_FFI_Buffer* to, FrameBuffer* from) {
  to->struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  to->extension_start = NULL;
  to->dtype = (XLA_FFI_DataType)from->dtype;
  to->data = (void*)from->data;
  to->rank = from->rank;
  to->dims = from->dims;
}

// Runs `handler` at `stage` with `args`, `rets` and `attributes`, which are sorted by name.
int frame_call(XLA_FFI_Handler* handler, int stage, FrameBuffer* args, int arg_count, FrameBuffer* rets,
               int ret_count, FrameAttribute* attributes, int attribute_count, uint64_t stream,
               int stream_fails, char* error, size_t error_size) {
  if (arg_count > MAX_BUFFERS || ret_count > MAX_BUFFERS || attribute_count > MAX_ATTRIBUTES) {
    abort();
  }
  XLA_FFI_Buffer arg_buffers[MAX_BUFFERS], ret_buffers[MAX_BUFFERS];
  XLA_FFI_ArgType arg_types[MAX_BUFFERS];
  XLA_FFI_RetType ret_types[MAX_BUFFERS];
  void *arg_pointers[MAX_BUFFERS], *ret_pointers[MAX_BUFFERS], *attribute_pointers[MAX_ATTRIBUTES];
  XLA_FFI_AttrType attribute_types[MAX_ATTRIBUTES];
  XLA_FFI_ByteSpan names[MAX_ATTRIBUTES], texts[MAX_ATTRIBUTES];
  XLA_FFI_ByteSpan* name_pointers[MAX_ATTRIBUTES];
  XLA_FFI_Scalar scalars[MAX_ATTRIBUTES];
  for (int i = 0; i < arg_count; ++i) {
    fill_buffer(&arg_buffers[i], &args[i]);
    arg_types[i] = XLA_FFI_ArgType_BUFFER;
    arg_pointers[i] = &arg_buffers[i];
  }
  for (int i = 0; i < ret_count; ++i) {
    fill_buffer(&ret_buffers[i], &rets[i]);
    ret_types[i] = XLA_FFI_RetType_BUFFER;
    ret_pointers[i] = &ret_buffers[i];
  }
  for (int i = 0; i < attribute_count; ++i) {
    FrameAttribute* from = &attributes[i];
    names[i] = (XLA_FFI_ByteSpan){from->name, strlen(from->name)};
    name_pointers[i] = &names[i];
    if (from->dtype == 0) {
      texts[i] = (XLA_FFI_ByteSpan){from->text, strlen(from->text)};
      attribute_types[i] = XLA_FFI_AttrType_STRING;
      attribute_pointers[i] = &texts[i];
    } else {
      scalars[i].dtype = (XLA_FFI_DataType)from->dtype;
      scalars[i].value = from->dtype == XLA_FFI_DataType_PRED  ? (void*)&from->boolean
                         : from->dtype == XLA_FFI_DataType_S32 ? (void*)&from->int32
                                                               : (void*)&from->int64;
      attribute_types[i] = XLA_FFI_AttrType_SCALAR;
      attribute_pointers[i] = &scalars[i];
    }
  }
  const XLA_FFI_Api api = make_api();
  XLA_FFI_ExecutionContext context = {stream, stream_fails};
  XLA_FFI_CallFrame frame;
  memset(&frame, 0, sizeof(frame));
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = (XLA_FFI_ExecutionStage)stage;
  frame.args = (XLA_FFI_Args){XLA_FFI_Args_STRUCT_SIZE, NULL, arg_count, arg_types, arg_pointers};
  frame.rets = (XLA_FFI_Rets){XLA_FFI_Rets_STRUCT_SIZE, NULL, ret_count, ret_types, ret_pointers};
  frame.attrs = (XLA_FFI_Attrs){XLA_FFI_Attrs_STRUCT_SIZE, NULL,          attribute_count,
                                attribute_types,           name_pointers, attribute_pointers};
  return take_error(handler(&frame), error, error_size);
}

// Asks `handler` for the API version it was built with and its traits, as XLA does when it is registered.
int frame_metadata(XLA_FFI_Handler* handler, int* major, int* minor, uint32_t* traits, char* error,
                   size_t error_size) {
  XLA_FFI_Metadata metadata;
  memset(&metadata, 0, sizeof(metadata));
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension;
  memset(&extension, 0, sizeof(extension));
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  const XLA_FFI_Api api = make_api();
  XLA_FFI_CallFrame frame;
  memset(&frame, 0, sizeof(frame));
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.extension_start = &extension.extension_base;
  const int code = take_error(handler(&frame), error, error_size);
  *major = metadata.api_version.major_version;
  *minor = metadata.api_version.minor_version;
  *traits = metadata.traits;
  return code;
}
