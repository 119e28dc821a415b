package facts

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Kind is the way in which QEMU runs guest code.
type Kind string

const (
	KVM Kind = "kvm" // guest code runs directly on the processor
	TCG Kind = "tcg" // QEMU translates guest code, which then runs 10 to 50 times slower
)

// Mode is the operator's choice for [Accel].
type Mode string

const (
	Auto    Mode = "auto" // KVM if it runs guests at hardware speed, else TCG
	WantKVM Mode = "kvm"  // KVM, or an error
	WantTCG Mode = "tcg"  // TCG, without probing KVM
)

// Accelerator is the result of [Accel]: how guests run here, and the reason.
type Accelerator struct {
	Kind   Kind
	Reason string // one line, for the operator
}

const (
	guestLoops   = 1_000_000              // loops of the guest: two instructions each, under 2 ms for all on hardware
	window       = 100 * time.Millisecond // duration of one run of the guest, in which hardware finishes all loops
	windows      = 10                     // maximum number of runs, if other processes keep the processor busy
	probeTimeout = 5 * time.Second        // maximum time of the whole probe, in case a system call hangs
)

// Accel determines whether QEMU should run guests with KVM or TCG on this host. For Auto and WantKVM it probes KVM: it
// runs a guest with one processor and a million kernel-mode loops. Hardware needs about a millisecond for them, a KVM
// that interprets guest code about a second. The probe ends after 100 ms if the guest has used at least 50 ms of
// processor time by then. On a busy host it continues until the guest has used 50 ms, for a second at most. Accel
// returns an error if mode is unknown, ctx ends, or mode is WantKVM and KVM does not run guests.
//
// Accel closes all descriptors that it opened, with one exception: if the kernel does not return from an ioctl within 5
// seconds, despite a signal, the probe's thread and descriptors remain until the ioctl returns. Auto then returns TCG,
// and WantKVM an error.
func Accel(ctx context.Context, mode Mode) (Accelerator, error) {
	return chooseAccelerator(ctx, mode, probeKVM)
}

func chooseAccelerator(ctx context.Context, mode Mode, probe func(context.Context) (time.Duration, error)) (Accelerator, error) {
	switch mode {
	case Auto, WantKVM:
	case WantTCG:
		return Accelerator{Kind: TCG, Reason: "configured"}, nil
	default:
		return Accelerator{}, fmt.Errorf("unknown acceleration %q, want auto, kvm or tcg", mode)
	}
	took, err := withTimeout(ctx, probe)
	switch {
	case err == nil:
		return Accelerator{Kind: KVM, Reason: fmt.Sprintf("%d loops of guest code in %v", guestLoops, took.Round(10*time.Microsecond))}, nil
	case ctx.Err() != nil:
		return Accelerator{}, fmt.Errorf("probe KVM: %w", ctx.Err())
	case mode == WantKVM:
		return Accelerator{}, fmt.Errorf("acceleration kvm is configured, but KVM does not run guests here: %w", err)
	}
	return Accelerator{Kind: TCG, Reason: err.Error()}, nil
}

// withTimeout runs probe in a goroutine, and abandons it if it does not return within probeTimeout.
func withTimeout(ctx context.Context, probe func(context.Context) (time.Duration, error)) (time.Duration, error) {
	type answer struct {
		took time.Duration
		err  error
	}
	result := make(chan answer, 1)
	go func() {
		took, err := probe(ctx)
		result <- answer{took, err}
	}()
	t := time.NewTimer(probeTimeout)
	defer t.Stop()
	select {
	case a := <-result:
		return a.took, a.err
	case <-t.C:
		return 0, fmt.Errorf("KVM did not respond within %v", probeTimeout)
	}
}

// Constants of the kernel's linux/kvm.h, for amd64.
const (
	kvmGetAPIVersion       = 0xAE00
	kvmCreateVM            = 0xAE01
	kvmCheckExtension      = 0xAE03
	kvmGetVCPUMmapSize     = 0xAE04
	kvmCreateVCPU          = 0xAE41
	kvmSetUserMemoryRegion = 0x4020AE46
	kvmRun                 = 0xAE80
	kvmSetRegs             = 0x4090AE82
	kvmGetSregs            = 0x8138AE83
	kvmSetSregs            = 0x4138AE84

	kvmAPIVersion       = 12
	kvmCapImmediateExit = 136
	kvmExitHlt          = 5
)

type kvmRegion struct {
	slot, flags    uint32
	gpa, size, hva uint64
}

type kvmSegment struct {
	base                                         uint64
	limit                                        uint32
	selector                                     uint16
	typ, present, dpl, db, s, l, g, avl, bad, __ uint8
}

type kvmTable struct {
	base  uint64
	limit uint16
	_     [3]uint16
}

type kvmSregs struct {
	cs, ds, es, fs, gs, ss, tr, ldt     kvmSegment
	gdt, idt                            kvmTable
	cr0, cr2, cr3, cr4, cr8, efer, apic uint64
	interrupts                          [4]uint64
}

type kvmRegs struct {
	general     [16]uint64
	rip, rflags uint64
}

// kvmRunPage is the beginning of struct kvm_run, which is shared with the kernel.
type kvmRunPage struct {
	flags      uint32 // byte 1 is immediate_exit: if it is set, the next KVM_RUN returns EINTR at once
	_          uint32
	exitReason uint32
}

const immediateExit = 1 << 8

const codeAt = 0x1000

// guestCode returns the machine code of: mov ecx, n; again: dec ecx; jnz again; hlt
func guestCode(n uint32) []byte {
	return append(binary.LittleEndian.AppendUint32([]byte{0xb9}, n), 0xff, 0xc9, 0x75, 0xfc, 0xf4)
}

// guest is the virtual machine of the KVM probe. It has one processor and 64 KiB of memory.
type guest struct {
	kvm, vm, cpu int    // file descriptors; -1 if not open
	mem, run     []byte // mappings of the guest's memory and of kvm_run; nil if not mapped
}

func probeKVM(ctx context.Context) (time.Duration, error) { return runLoops(ctx, guestLoops) }

// runLoops runs n loops of guest code and returns the time they took.
func runLoops(ctx context.Context, n uint32) (time.Duration, error) {
	if runtime.GOARCH != "amd64" {
		return 0, fmt.Errorf("the KVM probe has no guest code for %s", runtime.GOARCH)
	}
	g := &guest{kvm: -1, vm: -1, cpu: -1}
	defer g.close()
	if err := g.open(); err != nil {
		return 0, err
	}
	copy(g.mem[codeAt:], guestCode(n))
	if err := g.reset(); err != nil {
		return 0, err
	}
	return g.spin(ctx)
}

func (g *guest) open() error {
	var err error
	if g.kvm, err = unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open /dev/kvm: %w", err)
	}
	v, err := ioctl(g.kvm, kvmGetAPIVersion, 0)
	if err != nil {
		return fmt.Errorf("read KVM API version: %w", err)
	}
	if v != kvmAPIVersion {
		return fmt.Errorf("KVM API version is %d, want %d", v, kvmAPIVersion)
	}
	if has, err := ioctl(g.kvm, kvmCheckExtension, kvmCapImmediateExit); err != nil || has == 0 {
		return errors.New("KVM has no immediate exit: kernel older than 4.11")
	}
	if g.vm, err = ioctl(g.kvm, kvmCreateVM, 0); err != nil {
		return fmt.Errorf("create VM: %w", err)
	}
	if g.mem, err = unix.Mmap(-1, 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS); err != nil {
		return fmt.Errorf("map guest memory: %w", err)
	}
	region := kvmRegion{size: uint64(len(g.mem)), hva: uint64(uintptr(unsafe.Pointer(&g.mem[0])))}
	if err := ioctlAt(g.vm, kvmSetUserMemoryRegion, unsafe.Pointer(&region)); err != nil {
		return fmt.Errorf("give memory to VM: %w", err)
	}
	if g.cpu, err = ioctl(g.vm, kvmCreateVCPU, 0); err != nil {
		return fmt.Errorf("create vCPU: %w", err)
	}
	size, err := ioctl(g.kvm, kvmGetVCPUMmapSize, 0)
	if err != nil {
		return fmt.Errorf("read size of vCPU state: %w", err)
	}
	if g.run, err = unix.Mmap(g.cpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map vCPU state: %w", err)
	}
	return nil
}

func (g *guest) close() {
	for _, m := range [][]byte{g.run, g.mem} {
		if m != nil {
			_ = unix.Munmap(m)
		}
	}
	for _, fd := range []int{g.cpu, g.vm, g.kvm} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// reset sets the registers of the guest's processor so that it runs the code at codeAt: in ring 0, 32-bit protected
// mode, with flat segments and without paging.
func (g *guest) reset() error {
	var s kvmSregs
	if err := ioctlAt(g.cpu, kvmGetSregs, unsafe.Pointer(&s)); err != nil {
		return fmt.Errorf("read vCPU registers: %w", err)
	}
	data := kvmSegment{limit: 0xffffffff, selector: 16, typ: 3, present: 1, db: 1, s: 1, g: 1}
	s.ds, s.es, s.fs, s.gs, s.ss = data, data, data, data, data
	s.cs = data
	s.cs.selector, s.cs.typ = 8, 11
	s.cr0 |= 1
	if err := ioctlAt(g.cpu, kvmSetSregs, unsafe.Pointer(&s)); err != nil {
		return fmt.Errorf("set vCPU registers: %w", err)
	}
	r := kvmRegs{rip: codeAt, rflags: 2}
	if err := ioctlAt(g.cpu, kvmSetRegs, unsafe.Pointer(&r)); err != nil {
		return fmt.Errorf("set vCPU registers: %w", err)
	}
	return nil
}

var errKicked = errors.New("kicked")

// spin runs the guest until it halts, and returns how long that took. It calls enter at most windows times. It returns
// an error if the guest has not halted after all these calls, or after the calls have used at least window/2 of
// processor time.
func (g *guest) spin(ctx context.Context) (time.Duration, error) {
	runtime.LockOSThread() // enter sends its signal to this thread, and threadTime measures this thread
	defer runtime.UnlockOSThread()
	start, used := time.Now(), threadTime()
	for range windows {
		err := g.enter(ctx)
		if err == nil {
			return time.Since(start), nil
		}
		if !errors.Is(err, errKicked) {
			return 0, err
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		if threadTime()-used >= window/2 {
			return 0, fmt.Errorf("guest code that takes hardware 2ms was not done in %v: this KVM interprets it", time.Since(start).Round(time.Millisecond))
		}
	}
	return 0, fmt.Errorf("the host was too busy to run the probe for %v in %v", window/2, windows*window)
}

// enter runs the guest until it halts, at most for the duration window. If the guest has not halted, enter returns
// errKicked, and the next call of enter continues the guest where it was interrupted.
func (g *guest) enter(ctx context.Context) error {
	page := (*kvmRunPage)(unsafe.Pointer(&g.run[0]))
	atomic.StoreUint32(&page.flags, 0)
	pid, tid := unix.Getpid(), unix.Gettid()
	ctx, cancel := context.WithTimeout(ctx, window)
	defer cancel()
	kicked := make(chan struct{})
	// When ctx ends, the ioctl KVM_RUN must return. If the thread is about to call KVM_RUN, the flag immediateExit
	// makes that call return at once. If the thread is in KVM_RUN, the signal interrupts it. SIGURG has no other
	// effect: Go's runtime uses it itself and ignores a SIGURG that it did not send.
	stop := context.AfterFunc(ctx, func() {
		defer close(kicked)
		atomic.StoreUint32(&page.flags, immediateExit)
		_ = unix.Tgkill(pid, tid, unix.SIGURG)
	})
	defer func() {
		if !stop() {
			<-kicked // the callback must end before the caller unmaps the page or unlocks the thread
		}
	}()
	for {
		_, err := ioctl(g.cpu, kvmRun, 0)
		switch {
		case errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN):
			if atomic.LoadUint32(&page.flags)&immediateExit != 0 {
				return errKicked
			}
		case err != nil:
			return fmt.Errorf("run guest: %w", err)
		case page.exitReason != kvmExitHlt:
			return fmt.Errorf("run guest: it stopped for KVM's reason %d instead of halting", page.exitReason)
		default:
			return nil
		}
	}
}

func threadTime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) // this clock is always available on Linux
	return time.Duration(ts.Nano())
}

func ioctl(fd int, request, arg uintptr) (int, error) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, arg)
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

func ioctlAt(fd int, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}
