package vm

import (
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// disk is a parsed value of the flag --disk. image is the name or ID of its image; empty for a blank disk.
type disk struct {
	id, image string
	sizeGiB   uint64
	bus       vmv1.DiskBus
	cache     vmv1.DiskCache
	boot      uint32
}

var (
	buses = map[string]vmv1.DiskBus{
		"virtio": vmv1.DiskBus_DISK_BUS_VIRTIO, "scsi": vmv1.DiskBus_DISK_BUS_SCSI,
		"ide": vmv1.DiskBus_DISK_BUS_IDE, "sata": vmv1.DiskBus_DISK_BUS_SATA,
	}
	caches = map[string]vmv1.DiskCache{
		"none": vmv1.DiskCache_DISK_CACHE_NONE, "writeback": vmv1.DiskCache_DISK_CACHE_WRITEBACK,
		"writethrough": vmv1.DiskCache_DISK_CACHE_WRITETHROUGH,
	}
)

const diskForm = "SIZE[,image=NAME|ID][,bus=virtio|scsi|ide|sata][,cache=none|writeback|writethrough][,id=ID][,boot-index=N]"

// parseDisk parses text, the value of the n-th flag --disk, counted from 0. The disk's ID is "disk" followed by n,
// unless text contains an ID.
func parseDisk(n int, text string) (disk, error) {
	bad := func(what string) (disk, error) {
		return disk{}, session.Usagef("--disk %q: %s: want %s", text, what, diskForm)
	}
	size, options, more := strings.Cut(text, ",")
	d := disk{id: "disk" + strconv.Itoa(n)}
	var ok bool
	if d.sizeGiB, ok = session.Amount(size, session.GiB); !ok {
		return bad("the size is not a number of GiB")
	}
	var seen []string
	for option := range strings.SplitSeq(options, ",") {
		if !more {
			break
		}
		key, value, _ := strings.Cut(option, "=")
		if slices.Contains(seen, key) {
			return bad(key + " is given twice")
		}
		seen = append(seen, key)
		ok := value != ""
		switch key {
		case "image":
			d.image = value
		case "id":
			d.id = value
		case "bus":
			d.bus, ok = buses[value]
		case "cache":
			d.cache, ok = caches[value]
		case "boot-index":
			n, err := strconv.ParseUint(value, 10, 32)
			d.boot, ok = uint32(n), err == nil
		default:
			return bad(strconv.Quote(option) + " is unknown")
		}
		if !ok {
			return bad(strconv.Quote(option) + " has an invalid value")
		}
	}
	return d, nil
}

// spec returns the disk as a field of a request. imageID is the ID of its image; empty for a blank disk.
func (d *disk) spec(imageID string) *vmv1.DiskSpec {
	source := &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}
	if imageID != "" {
		source.Source = &vmv1.DiskSource_ImageId{ImageId: imageID}
	}
	return &vmv1.DiskSpec{Id: d.id, Source: source, SizeGib: d.sizeGiB, Bus: d.bus, Cache: d.cache, BootIndex: d.boot}
}
