package libvirt

import (
	"encoding/xml"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Domain describes a libvirt guest with the same devices as the Trivet guest that it is compared with: a q35 machine
// that is emulated (TCG), one virtio disk, perhaps with a backing file, a serial port that writes to a file,
// virtio-rng, a balloon, a panic device and a generation id.
type Domain struct {
	Name, UUID string
	Machine    string // QEMU's machine type, such as pc-q35-7.2
	CPUMaximum bool   // selects QEMU's CPU model max, otherwise qemu64
	VCPUs      int
	MemoryMiB  uint64
	// Kernel, Initrd and Cmdline are for a direct kernel boot. If Kernel is "", the guest boots from its disk.
	Kernel, Initrd, Cmdline string
	// Disk is the path of the disk's QCOW2 file. Base is the path of its backing file, or "" for none.
	Disk, Base string
	// Raw means that Disk is a raw file without a backing file, which is opened without the page cache.
	Raw bool
	// Bridge is the name of the bridge to which the network interface is attached, and MAC the address of the interface.
	// If Bridge is "", there is no interface.
	Bridge, MAC string
	// Serial is the file that receives the output of the serial port.
	Serial string
	// Ports is the number of PCIe root ports, to which the devices are attached.
	Ports int
	// TBSizeMiB is the size limit of TCG's cache of translated code (translation blocks).
	TBSizeMiB int
}

// Write writes the domain's XML to a file beneath dir and returns its path.
func (d Domain) Write(dir string) (string, error) {
	path := filepath.Join(dir, d.Name+".xml")
	return path, os.WriteFile(path, []byte(d.XML()), 0o644)
}

// XML returns the domain as libvirt's domain XML.
func (d Domain) XML() string {
	var b strings.Builder
	add := func(format string, args ...any) {
		for i, a := range args {
			if s, ok := a.(string); ok {
				args[i] = escape(s)
			}
		}
		fmt.Fprintf(&b, format+"\n", args...)
	}
	cpu := "<cpu mode='maximum'/>"
	if !d.CPUMaximum {
		cpu = "<cpu mode='custom' match='exact' check='none'><model fallback='forbid'>qemu64</model></cpu>"
	}
	add("<domain type='qemu'>")
	add("<name>%s</name><uuid>%s</uuid><genid>%s</genid>", d.Name, d.UUID, d.UUID)
	add("<memory unit='MiB'>%d</memory><vcpu>%d</vcpu>", d.MemoryMiB, d.VCPUs)
	add("<os><type arch='x86_64' machine='%s'>hvm</type>", d.Machine)
	if d.Kernel != "" {
		add("<kernel>%s</kernel><initrd>%s</initrd><cmdline>%s</cmdline>", d.Kernel, d.Initrd, d.Cmdline)
	}
	add("</os>")
	add("<features><acpi/><apic/><vmport state='off'/><tcg><tb-cache unit='MiB'>%d</tb-cache></tcg></features>", d.TBSizeMiB)
	b.WriteString(cpu + "\n")
	add("<clock offset='utc'/><on_poweroff>destroy</on_poweroff><on_reboot>restart</on_reboot><on_crash>destroy</on_crash>")
	add("<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>")
	format, cache := "qcow2", "writeback"
	if d.Raw {
		format, cache = "raw", "none"
	}
	add("<disk type='file' device='disk'><driver name='qemu' type='%s' cache='%s' discard='unmap'/><source file='%s'/>", format, cache, d.Disk)
	if d.Base != "" {
		add("<backingStore type='file'><format type='qcow2'/><source file='%s'/><backingStore/></backingStore>", d.Base)
	} else {
		add("<backingStore/>")
	}
	add("<target dev='vda' bus='virtio'/>")
	if d.Kernel == "" {
		add("<boot order='1'/>")
	}
	add("</disk>")
	for i := range d.Ports {
		add("<controller type='pci' index='%d' model='pcie-root-port'/>", i+1)
	}
	add("<controller type='usb' model='none'/>")
	if d.Bridge != "" {
		add("<interface type='bridge'><source bridge='%s'/><mac address='%s'/><model type='virtio'/></interface>", d.Bridge, d.MAC)
	}
	add("<serial type='file'><source path='%s'/></serial>", d.Serial)
	add("<memballoon model='virtio' freePageReporting='on'/>")
	add("<rng model='virtio'><backend model='builtin'/></rng><panic model='isa'/>")
	add("</devices></domain>")
	return b.String()
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // its only error would be that of the Builder, which returns none
	return b.String()
}
