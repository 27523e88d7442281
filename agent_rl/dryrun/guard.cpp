// What torch asks of CUDA where a tensor only names it: a device guard that does nothing, and that there is one GPU.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::Device;
using c10::DeviceType;
using c10::Stream;

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return first(); }
  Device getDevice() const override { return first(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

 private:
  static Device first() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, first()); }
};
}  // namespace

namespace at {
struct CUDAHooks final : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
