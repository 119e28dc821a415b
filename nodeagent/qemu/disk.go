package qemu

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Bus is the kind of controller that a disk is attached to.
type Bus string

const (
	Virtio Bus = "virtio" // virtio-blk, each disk at its own PCIe root port
	SCSI   Bus = "scsi"   // virtio-scsi
	IDE    Bus = "ide"    // a PIIX3 controller, added to the chipset
	SATA   Bus = "sata"   // the chipset's AHCI
)

// slots is the maximum number of disks on each bus.
var slots = map[Bus]int{Virtio: 16, SCSI: 16, IDE: 4, SATA: 6}

// Cache is a disk's cache mode. It determines when a write of the guest is reported as done.
type Cache string

const (
	NoCache      Cache = "none"         // written without the host's page cache; the guest's flushes are executed
	Writeback    Cache = "writeback"    // in the host's page cache; the guest's flushes are executed
	Writethrough Cache = "writethrough" // each write is flushed before it is reported as done
)

// Disk is one disk: a file, with or without a base image, or an RBD image.
type Disk struct {
	ID       string       `json:"id"` // its first 20 characters are the disk's serial number
	Bus      Bus          `json:"bus"`
	Slot     int          `json:"slot"` // position on its bus, from 0; -1 means that KeepSlots chooses it
	Cache    Cache        `json:"cache"`
	Base     qcow2.Format `json:"base"` // format of the base image; "" if there is none
	ReadOnly bool         `json:"read_only"`
	// Format is the format of the disk's own file; "" means QCOW2. A raw file has no base image.
	Format qcow2.Format `json:"format,omitempty"`
	// Encrypted means that the content has LUKS encryption: that of the disk's own file, which is in QCOW2 format, or
	// that of the whole RBD image. Keys.Key is the passphrase. A base image is not encrypted.
	Encrypted bool `json:"encrypted,omitempty"`
	// RBD is the RBD image of a disk without files. If the disk is encrypted, the image begins with a LUKS header,
	// which the guest does not see.
	RBD *RBDImage `json:"rbd,omitempty"`
	// Size is the size in bytes to which ResizeDisk last grew the disk. Size is 0 if ResizeDisk has not grown the disk
	// since QEMU was started.
	Size uint64 `json:"size,omitempty"`
	// IOPS and BytesPerSecond limit reads and writes together; 0 means no limit.
	IOPS           uint64 `json:"iops,omitempty"`
	BytesPerSecond uint64 `json:"bytes_per_second,omitempty"`
	// Pool and Volume are the caller's names of the file, and Generation is the generation of the volume's attachment.
	// QEMU does not receive these fields. They are stored so that a later agent can release the volume.
	Pool       string `json:"pool,omitempty"`
	Volume     string `json:"volume,omitempty"`
	Generation uint64 `json:"volume_generation,omitempty"`
	// Standby means that the QEMU of a migration's target has the volume open, and has not written to it, because the
	// attachment with Generation has not begun.
	Standby bool `json:"standby,omitempty"`
}

// copied reports whether a migration copies the disk to the target. Both hosts can use a volume.
func (d Disk) copied() bool { return d.Volume == "" }

// maxLimit is the largest limit of a throttle group (util/throttle.c of QEMU).
const maxLimit = 1_000_000_000_000_000

func (d Disk) validate() error {
	switch {
	case !validDisk.MatchString(d.ID):
		return invalid("the disk id %q is not one", d.ID)
	case slots[d.Bus] == 0:
		return invalid("disk %s: the bus %q is not known", d.ID, d.Bus)
	case d.Slot < 0 || d.Slot >= slots[d.Bus]:
		return invalid("disk %s: the bus %s has slots 0 to %d, and not %d", d.ID, d.Bus, slots[d.Bus]-1, d.Slot)
	case d.Cache != NoCache && d.Cache != Writeback && d.Cache != Writethrough:
		return invalid("disk %s: the cache mode %q is not known", d.ID, d.Cache)
	case d.Base != "" && d.Base != qcow2.Raw && d.Base != qcow2.QCOW2:
		return invalid("disk %s: an image of format %q cannot lie beneath", d.ID, d.Base)
	case d.Format != "" && d.Format != qcow2.Raw && d.Format != qcow2.QCOW2:
		return invalid("disk %s: the format %q is not known", d.ID, d.Format)
	case d.Format == qcow2.Raw && d.Base != "":
		return invalid("disk %s: a raw file has no image beneath", d.ID)
	case d.Format == qcow2.Raw && d.Encrypted:
		return invalid("disk %s: a raw file cannot be encrypted", d.ID)
	case d.IOPS > maxLimit || d.BytesPerSecond > maxLimit:
		return invalid("disk %s: a limit is above %d", d.ID, uint64(maxLimit))
	case d.ReadOnly && (d.Bus == IDE || d.Bus == SATA):
		return invalid("disk %s: a hard disk at %s cannot be read-only", d.ID, d.Bus)
	}
	if d.RBD != nil {
		return d.validateRBD()
	}
	return nil
}

// Names of a disk's block nodes, throttle group and device in QEMU.
func (d Disk) node() string         { return fmt.Sprintf("%s%d", d.Bus, d.Slot) } // the top node, such as virtio0
func (d Disk) fileNode() string     { return d.node() + "-file" }
func (d Disk) formatNode() string   { return d.node() + "-format" } // exists only for a disk with limits
func (d Disk) baseNode() string     { return d.node() + "-base" }
func (d Disk) baseFile() string     { return d.node() + "-base-file" }
func (d Disk) groupID() string      { return d.node() + "-limits" }
func (d Disk) secretID() string     { return d.node() + "-key" }      // in QEMU only while the nodes are added
func (d Disk) userSecretID() string { return d.node() + "-user-key" } // that of the Ceph user, in QEMU as long as secretID
func (d Disk) deviceID() string     { return deviceID(d.ID) }

func deviceID(disk string) string { return "disk-" + disk }

// scsiID is the id of the SCSI controller, which has the bus scsi.0.
const scsiID = "scsi"

func (d Disk) limited() bool { return d.IOPS > 0 || d.BytesPerSecond > 0 }

// throttleGroup returns the object with the limits of a disk.
func (d Disk) throttleGroup() object {
	limits := object{}
	if d.IOPS > 0 {
		limits["iops-total"] = d.IOPS
	}
	if d.BytesPerSecond > 0 {
		limits["bps-total"] = d.BytesPerSecond
	}
	return object{"qom-type": "throttle-group", "id": d.groupID(), "limits": limits}
}

// diskSets are the numbers of the descriptor sets of a disk's files. base is valid only if the disk has a base image.
type diskSets struct{ overlay, base int }

// diskSets returns the descriptor sets of the disks on QEMU's command line, in the order of s.Disks, and the number of
// the first descriptor after theirs.
func (s Spec) diskSets() (sets []diskSets, next int) {
	next = fdDisks
	for _, d := range s.Disks {
		if d.RBD != nil {
			sets = append(sets, diskSets{})
			continue
		}
		one := diskSets{overlay: next}
		next++
		if d.Base != "" {
			one.base = next
			next++
		}
		sets = append(sets, one)
	}
	return sets, next
}

// blockNodes returns the block nodes of a disk. Each node comes after the nodes that it refers to.
func (d Disk) blockNodes(sets diskSets) []object {
	var nodes []object
	var beneath any
	if d.Base != "" {
		beneath = d.baseNode()
		nodes = append(nodes, object{"driver": "file", "node-name": d.baseFile(), "filename": fdsetPath(sets.base),
			"read-only": true, "auto-read-only": false})
		base := object{"driver": string(d.Base), "node-name": d.baseNode(), "file": d.baseFile(), "read-only": true,
			"auto-read-only": false}
		if d.Base == qcow2.QCOW2 {
			base["backing"] = nil // A backing file named in the image is not opened.
		}
		nodes = append(nodes, base)
	}
	writable := func(o object) object {
		o["cache"] = object{"direct": d.Cache == NoCache, "no-flush": false}
		o["read-only"], o["auto-read-only"], o["discard"] = d.ReadOnly, false, "unmap"
		return o
	}
	top := d.node()
	if d.limited() {
		top = d.formatNode()
	}
	format := object{"driver": string(qcow2.QCOW2), "node-name": top, "file": d.fileNode()}
	switch {
	case d.RBD != nil && d.Encrypted:
		format["driver"], format["key-secret"] = "luks", d.secretID()
	case d.RBD != nil || d.Format == qcow2.Raw:
		format["driver"] = string(qcow2.Raw)
	default:
		format["backing"] = beneath
		if d.Encrypted {
			format["encrypt"] = object{"format": "luks", "key-secret": d.secretID()}
		}
	}
	file := object{"driver": "file", "node-name": d.fileNode(), "filename": fdsetPath(sets.overlay)}
	if d.RBD != nil {
		file = d.rbdNode()
	}
	nodes = append(nodes, writable(file), writable(format))
	if d.limited() {
		nodes = append(nodes, writable(object{"driver": "throttle", "node-name": d.node(), "file": top,
			"throttle-group": d.groupID()}))
	}
	return nodes
}

// device returns the -device argument of a disk. It is also the argument of the QMP command device_add.
func (d Disk) device() object {
	writeCache := "on"
	if d.Cache == Writethrough {
		writeCache = "off"
	}
	o := object{"id": d.deviceID(), "drive": d.node(), "serial": d.ID[:min(len(d.ID), maxSerial)],
		"write-cache": writeCache, "werror": "stop", "rerror": "stop"}
	switch d.Bus {
	case Virtio:
		o["driver"], o["bus"], o["addr"] = "virtio-blk-pci", portID(d.Slot), "0x0"
	case SCSI:
		o["driver"], o["bus"], o["channel"], o["scsi-id"], o["lun"] = "scsi-hd", scsiID+".0", 0, d.Slot, 0
	case IDE:
		o["driver"], o["bus"], o["unit"] = "ide-hd", fmt.Sprintf("pata.%d", d.Slot/2), d.Slot%2
	case SATA:
		o["driver"], o["bus"], o["unit"] = "ide-hd", fmt.Sprintf("ide.%d", d.Slot), 0
	}
	return o
}
