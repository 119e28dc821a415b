package qemu

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Numbers of the descriptors that every QEMU inherits. The descriptors of its disks have the numbers from fdDisks on.
// The descriptors of the seed, the taps, the CD-ROM image, the firmware and the TPM follow, in this order.
const (
	fdWork    = 3 + iota // listening socket of the monitor for commands that change the machine
	fdInspect            // listening socket of the monitor for queries and events
	fdConsole            // listening socket of the serial port
	fdLog                // log of the serial port, open for appending
	fdAgent              // listening socket of the virtio-serial port for the guest agent (qemu-ga)
	fdDisks              // overlay and base of each disk, in the order of Spec.Disks; then the others, see above
)

// Paths of the kernel and the initrd in QEMU's own mount namespace.
const (
	kernelPath = "/boot/kernel"
	initrdPath = "/boot/initrd"
)

// Addresses of devices on the PCIe root bus. The chipset occupies 0 and 0x1f.
const (
	addrDisplay = 0x01
	addrRNG     = 0x02
	addrBalloon = 0x03
	addrPorts   = 0x04 // first of up to 3 addresses with 8 root ports each, for disks
	addrNICs    = 0x07 // 8 root ports, for network interfaces
	addrSeed    = 0x08 // root port of the seed
	addrIDE     = 0x09
	addrSCSI    = 0x0a
	addrSerial  = 0x0b
)

// sparePorts is the number of free PCIe root ports that a VM has, for disks that are attached later.
const sparePorts = 4

// object is a JSON object in an argument of QEMU. Its keys are encoded in sorted order, so that equal specs give equal
// arguments.
type object map[string]any

func (o object) String() string {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // This cannot happen: the values are strings, numbers, booleans, nil and objects.
	}
	return string(text)
}

// Argv returns QEMU's command line for a VM, including the program. It is a pure function: equal specs give equal
// arguments, which live migration needs. The error wraps [ErrInvalid].
//
// The only strings of a tenant in it are the ids of disks and network interfaces, and MAC addresses. [Spec.Validate]
// limits them to [a-z0-9:-]. The kernel's command line is not an argument, because every user of the host can read
// arguments: see [Process.configure]. The keys of encrypted disks and of RBD images are not arguments either, for the
// same reason.
func Argv(program string, s Spec) ([]string, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	a := args{program}
	a.add("-name", "guest="+s.ID+",debug-threads=on")
	a.add("-nodefaults", "-no-user-config")
	a.add("-machine", s.machine())
	a.add("-accel", s.accel())
	a.add("-cpu", s.cpu())
	a.add("-smp", s.smp())
	a.add("-m", fmt.Sprintf("size=%dM", s.MemoryMiB))
	if s.Hugepages {
		memory := object{"qom-type": "memory-backend-memfd", "id": memoryBackend, "size": s.MemoryMiB << 20,
			"hugetlb": true, "hugetlbsize": hugepageMiB << 20, "prealloc": true, "prealloc-threads": min(s.VCPUs, 16)}
		if s.MemoryNode != nil {
			memory["host-nodes"], memory["policy"] = []int{*s.MemoryNode}, "preferred"
		}
		a.json("-object", memory)
	}
	a.add("-uuid", s.ID)
	a.add("-smbios", "type=1,manufacturer=Trivet,product=Virtual Machine,uuid="+s.ID)
	a.add("-rtc", s.rtc())
	a.add("-display", "none")
	a.add("-S")
	a.add("-action", "reboot=reset,shutdown=pause,panic=pause")
	a.add("-boot", "strict=on")
	a.add("-msg", "timestamp=on")
	if !mutant.On(mutant.GuestUnsandboxed) {
		a.add("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
	}
	a.monitors()
	a.console()
	if s.Display {
		a.display()
	}
	a.ports(s)
	a.platform(s)
	fd := a.disks(s)
	if s.Seed {
		a.seed(fd)
		fd++
	}
	a.nics(s, fd)
	fd += len(s.NICs)
	if s.CDROM != "" {
		a.cdrom(s, fd)
		fd++
	}
	if s.UEFI {
		a.firmware(s, fd)
		fd += 2
	}
	if s.TPM {
		a.tpm(fd)
	}
	if s.Kernel {
		a.add("-kernel", kernelPath)
		if s.Initrd {
			a.add("-initrd", initrdPath)
		}
	}
	if s.Cmdline != "" || s.hasKeys() {
		a.add(preconfig)
	}
	return a, nil
}

func (s Spec) machine() string {
	m := s.Machine + ",usb=off,vmport=off,dump-guest-core=off"
	if s.VCPUs > maxTCGVCPUs {
		m += ",kernel-irqchip=split"
	}
	if s.Windows {
		m += ",hpet=off"
	}
	if s.Hugepages {
		m += ",memory-backend=" + memoryBackend
	}
	return m + s.machineFlash()
}

// memoryBackend is the ID of the object for a guest's memory that consists of huge pages. The object takes all pages when
// QEMU starts (prealloc), so that a guest never ends because the host has no page left.
const memoryBackend = "memory"

// hyperV contains the options of -cpu for the interfaces of Hyper-V that QEMU offers to Windows with KVM. The host
// needs no Hyper-V.
const hyperV = ",hv-relaxed=on,hv-vapic=on,hv-spinlocks=0x1fff,hv-vpindex=on,hv-runtime=on,hv-time=on,hv-synic=on,hv-stimer=on"

func (s Spec) cpu() string {
	if s.Windows && s.Accel == KVM {
		return s.CPUModel + hyperV
	}
	return s.CPUModel
}

// rtc returns the option -rtc. Windows keeps time by counting timer interrupts, so QEMU delivers lost interrupts to it
// later (driftfix=slew).
func (s Spec) rtc() string {
	rtc := "base=utc"
	if s.LocalTime {
		rtc = "base=localtime"
	}
	if s.Windows {
		rtc += ",driftfix=slew"
	}
	return rtc
}

func (s Spec) accel() string {
	if s.Accel == TCG {
		return fmt.Sprintf("tcg,tb-size=%d", translated)
	}
	return string(s.Accel)
}

func (s Spec) smp() string {
	sockets, cores := s.topology()
	return fmt.Sprintf("cpus=%d,maxcpus=%d,sockets=%d,dies=1,cores=%d,threads=1", s.VCPUs, s.VCPUs, sockets, cores)
}

// args is the list of QEMU's arguments, to which the methods append.
type args []string

func (a *args) add(words ...string) { *a = append(*a, words...) }

func (a *args) json(option string, o object) { a.add(option, o.String()) }

func (a *args) monitors() {
	for _, m := range []struct {
		id string
		fd int
	}{{"qmp-work", fdWork}, {"qmp-inspect", fdInspect}} {
		a.add("-chardev", fmt.Sprintf("socket,id=%s,fd=%d,server=on,wait=off", m.id, m.fd))
		a.add("-mon", "chardev="+m.id+",mode=control")
	}
}

// console adds the serial port, with a socket for input and output, and a log. A client of the socket must read from
// it. Otherwise the guest's output stops. QEMU 7.2 then sends a byte again later, and writes it to the log twice.
func (a *args) console() {
	a.fdset(fdLog, "console")
	a.add("-chardev", fmt.Sprintf("socket,id=console,fd=%d,server=on,wait=off,logfile=%s,logappend=on", fdConsole, fdsetPath(fdLog)))
	a.json("-device", object{"driver": "isa-serial", "id": "serial0", "chardev": "console", "index": 0})
}

// fdset adds a descriptor set that contains only the descriptor fd. The set has the same number as the descriptor. QEMU
// shows note as a comment of the descriptor.
func (a *args) fdset(fd int, note string) {
	a.add("-add-fd", fmt.Sprintf("fd=%d,set=%d,opaque=%s", fd, fd, note))
}

func fdsetPath(set int) string { return fmt.Sprintf("/dev/fdset/%d", set) }

// ports adds the PCIe root ports. A virtio disk is attached to the port whose number is the disk's slot, so ports adds
// one for each slot up to the highest slot in use. It adds sparePorts more, which stay free. The ports of network
// interfaces are at their own address, so that a disk that is added does not change the addresses of the interfaces.
func (a *args) ports(s Spec) {
	last := -1
	for _, d := range s.Disks {
		if d.Bus == Virtio {
			last = max(last, d.Slot)
		}
	}
	count := last + 1 + sparePorts
	if s.DiskPorts > 0 {
		count = max(s.DiskPorts, last+1)
	}
	for i := range count {
		a.json("-device", object{"driver": "pcie-root-port", "id": portID(i), "bus": "pcie.0",
			"addr": fmt.Sprintf("0x%x.0x%x", addrPorts+i/8, i%8), "multifunction": true, "port": i, "chassis": i + 1})
	}
	const firstNIC = 0x20 // number of the first port for network interfaces, above those of the disks
	for i := range s.nicPorts() {
		a.json("-device", object{"driver": "pcie-root-port", "id": nicPortID(i), "bus": "pcie.0",
			"addr": fmt.Sprintf("0x%x.0x%x", addrNICs, i), "multifunction": true, "port": firstNIC + i, "chassis": firstNIC + i + 1})
	}
}

func portID(i int) string { return "port" + strconv.Itoa(i) }

// platform adds the devices that every VM has, and the IDE controller if s needs it. Every VM has a SCSI controller, so
// that SCSI disks can be attached while it runs, and a virtio-serial port for QEMU's agent in the guest.
func (a *args) platform(s Spec) {
	onRoot := func(addr int) string { return fmt.Sprintf("0x%x", addr) }
	if s.VCPUs > maxTCGVCPUs {
		a.json("-device", object{"driver": "intel-iommu", "id": "iommu", "intremap": "on", "eim": "on"})
	}
	a.json("-object", object{"qom-type": "rng-builtin", "id": "rng-source"})
	a.json("-device", object{"driver": "virtio-rng-pci", "id": "rng", "rng": "rng-source", "bus": "pcie.0", "addr": onRoot(addrRNG)})
	a.json("-device", object{"driver": "virtio-balloon-pci", "id": "balloon", "bus": "pcie.0", "addr": onRoot(addrBalloon),
		// A huge page that is given back could be taken by another process. The guest would end when it uses the page again.
		"free-page-reporting": !s.Hugepages})
	a.json("-device", object{"driver": "pvpanic", "id": "panic"})
	generation := s.GenerationID
	if generation == "" {
		generation = s.ID
	}
	a.json("-device", object{"driver": "vmgenid", "id": "generation", "guid": generation})
	if slices.ContainsFunc(s.Disks, func(d Disk) bool { return d.Bus == IDE }) {
		a.json("-device", object{"driver": "piix3-ide", "id": "pata", "bus": "pcie.0", "addr": onRoot(addrIDE)})
	}
	a.json("-device", object{"driver": "virtio-scsi-pci", "id": scsiID, "bus": "pcie.0", "addr": onRoot(addrSCSI)})
	a.add("-chardev", fmt.Sprintf("socket,id=%s,fd=%d,server=on,wait=off", agentChardev, fdAgent))
	a.json("-device", object{"driver": "virtio-serial-pci", "id": "ports", "bus": "pcie.0", "addr": onRoot(addrSerial), "max_ports": 2})
	a.json("-device", object{"driver": "virtserialport", "id": "agent", "bus": "ports.0", "nr": 1, "chardev": agentChardev,
		"name": "org.qemu.guest_agent.0"})
}

// disks adds the disks, and returns the number of the first descriptor after theirs. It does not add the block nodes of
// encrypted disks and RBD images, because their keys must not be arguments: see [Process.configure].
func (a *args) disks(s Spec) int {
	all, next := s.diskSets()
	for i, d := range s.Disks {
		sets := all[i]
		if d.Base != "" {
			a.fdset(sets.base, d.baseNode())
		}
		if d.RBD == nil {
			a.fdset(sets.overlay, d.node())
		}
		if !d.hasKey() {
			if d.limited() {
				a.json("-object", d.throttleGroup())
			}
			for _, node := range d.blockNodes(sets) {
				a.json("-blockdev", node)
			}
		}
		device := d.device()
		device["bootindex"] = i + 1 // unique, because QEMU refuses two disks with the same index
		a.json("-device", device)
	}
	return next
}

// seed adds the seed, whose descriptor is fd: a read-only virtio disk of its own root port, from which the firmware does
// not boot. The root port has a higher address than those of the other disks, so that Linux names those first (vda).
func (a *args) seed(fd int) {
	const port = 0x30 // above the numbers of all other ports
	a.json("-device", object{"driver": "pcie-root-port", "id": "seedport", "bus": "pcie.0", "addr": fmt.Sprintf("0x%x", addrSeed),
		"port": port, "chassis": port + 1})
	a.fdset(fd, "seed")
	a.json("-blockdev", object{"driver": "file", "node-name": "seed-file", "filename": fdsetPath(fd), "read-only": true,
		"auto-read-only": false})
	a.json("-blockdev", object{"driver": "raw", "node-name": "seed", "file": "seed-file", "read-only": true, "auto-read-only": false})
	a.json("-device", object{"driver": "virtio-blk-pci", "id": "seed", "drive": "seed", "bus": "seedport", "addr": "0x0",
		"serial": "cidata", "werror": "stop", "rerror": "stop"})
}
