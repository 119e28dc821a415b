package vm

import (
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// disk is a parsed value of the flag --disk or --volume.
//
// image is the name or ID of the image with which the disk begins; empty for a blank disk. volume is the name or ID of
// an existing volume; empty for a new disk. If class is not empty, the disk is a new volume of this storage class.
// Disks with first come before the others in the list of the VM's disks. Therefore they boot before other disks with
// the same boot index.
type disk struct {
	id, image, volume, class string
	sizeGiB                  uint64
	bus                      vmv1.DiskBus
	cache                    vmv1.DiskCache
	boot                     uint32
	first                    bool
	// named is true if the user has given the id.
	named bool
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

const (
	diskForm = "SIZE[,image=NAME|ID][,class=CLASS][,bus=virtio|scsi|ide|sata][,cache=none|writeback|writethrough][,id=ID][,boot-index=N]"
	// volumeForm is the syntax of the flag --volume.
	volumeForm = "NAME|ID[,boot][,bus=virtio|scsi|ide|sata][,cache=none|writeback|writethrough][,id=ID][,boot-index=N]"
)

// parseDisks returns the disks of the flags --image, --disk and --volume, in the order in which the VM has them.
func (f *createFlags) parseDisks() ([]disk, error) {
	disks := make([]disk, len(f.disks))
	for n, text := range f.disks {
		d, err := parseDisk(n, text)
		if err != nil {
			return nil, err
		}
		disks[n] = d
	}
	switch {
	case f.image != "" && len(disks) == 0:
		disks = []disk{{id: "disk0", image: f.image}} // findImages sets its size, which depends on the image
	case f.image != "" && disks[0].image != "":
		return nil, session.Usagef("the first disk has two images: %s and %s", f.image, disks[0].image)
	case f.image != "":
		disks[0].image = f.image
	}
	for _, text := range f.volumes {
		d, err := parseVolume(len(disks), text)
		if err != nil {
			return nil, err
		}
		disks = append(disks, d)
	}
	slices.SortStableFunc(disks, func(a, b disk) int {
		switch {
		case a.first == b.first:
			return 0
		case a.first:
			return -1
		}
		return 1
	})
	return disks, nil
}

// parseDisk parses text, the value of the n-th flag --disk, counted from 0. The disk's ID is "disk" followed by n,
// unless text contains an ID.
func parseDisk(n int, text string) (disk, error) {
	size, options, more := strings.Cut(strings.TrimPrefix(text, "size="), ",")
	d := disk{id: "disk" + strconv.Itoa(n)}
	var ok bool
	if d.sizeGiB, ok = session.Amount(size, session.GiB); !ok {
		return disk{}, session.Usagef("--disk %q: the size is not a number of GiB: want %s", text, diskForm)
	}
	if !more {
		return d, nil
	}
	problem := d.parseOptions(options, func(key, value string) (known, ok bool) {
		switch key {
		case "image":
			d.image = value
		case "class":
			d.class = value
		default:
			return false, false
		}
		return true, value != ""
	})
	if problem != "" {
		return disk{}, session.Usagef("--disk %q: %s: want %s", text, problem, diskForm)
	}
	return d, nil
}

// parseVolume parses text, a value of the flag --volume. n is the number of disks before this one. The disk's ID is
// "disk" followed by n, unless text contains an ID.
func parseVolume(n int, text string) (disk, error) {
	name, options, more := strings.Cut(text, ",")
	d := disk{id: "disk" + strconv.Itoa(n), volume: name}
	problem := ""
	switch {
	case name == "":
		problem = "the name of the volume is empty"
	case more:
		problem = d.parseOptions(options, func(key, value string) (known, ok bool) {
			if key != "boot" {
				return false, false
			}
			d.first = true
			return true, value == ""
		})
	}
	if problem != "" {
		return disk{}, session.Usagef("--volume %q: %s: want %s", text, problem, volumeForm)
	}
	return d, nil
}

// parseOptions sets the fields of the disk that the comma-separated options name. It calls other for an option that is
// not common to --disk and --volume. other returns whether it knows the option, and whether the value is valid.
// parseOptions returns a description of the first problem, or "".
func (d *disk) parseOptions(options string, other func(key, value string) (known, ok bool)) (problem string) {
	var seen []string
	for option := range strings.SplitSeq(options, ",") {
		key, value, _ := strings.Cut(option, "=")
		if slices.Contains(seen, key) {
			return key + " is given twice"
		}
		seen = append(seen, key)
		known, ok := true, value != ""
		switch key {
		case "id":
			d.id, d.named = value, true
		case "bus":
			d.bus, ok = buses[value]
		case "cache":
			d.cache, ok = caches[value]
		case "boot-index":
			n, err := strconv.ParseUint(value, 10, 32)
			d.boot, ok = uint32(n), err == nil
		default:
			known, ok = other(key, value)
		}
		if !known {
			return strconv.Quote(option) + " is unknown"
		}
		if !ok {
			return strconv.Quote(option) + " has an invalid value"
		}
	}
	return ""
}

// spec returns the disk as a field of a request. imageID is the ID of the disk's image, and volumeID is the ID of its
// volume. Both are empty for a blank disk.
func (d *disk) spec(imageID, volumeID string) *vmv1.DiskSpec {
	source := &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}
	switch {
	case volumeID != "":
		source.Source = &vmv1.DiskSource_VolumeId{VolumeId: volumeID}
		return &vmv1.DiskSpec{Id: d.id, Source: source, Bus: d.bus, Cache: d.cache, BootIndex: d.boot}
	case imageID != "":
		source.Source = &vmv1.DiskSource_ImageId{ImageId: imageID}
	}
	return &vmv1.DiskSpec{Id: d.id, Source: source, SizeGib: d.sizeGiB, Bus: d.bus, Cache: d.cache, BootIndex: d.boot}
}
