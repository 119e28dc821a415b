package qemu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

const (
	// diskReleaseTimeout is how long UnplugDisk waits for the guest to release a disk.
	diskReleaseTimeout = 5 * time.Second
	// nodeBusyTimeout is how long UnplugDisk waits until QEMU has ended the I/O of a device that the guest has
	// released.
	nodeBusyTimeout = 10 * time.Second
	nodeBusyPause   = 50 * time.Millisecond
)

var (
	// ErrDiskNotReleased means that the guest did not release a disk within 5 seconds. The next call of UnplugDisk asks
	// the guest again.
	ErrDiskNotReleased = errors.New("the guest did not release the device")

	// ErrNoDiskSlot means that the running QEMU has no free slot for a further disk. After the next start of the VM,
	// QEMU has free slots again.
	ErrNoDiskSlot = errors.New("the VM has no free slot for a further disk before its next start")

	// ErrNotPluggable means that disks of a bus cannot be attached to a running guest, nor detached.
	ErrNotPluggable = errors.New("disks on the buses IDE and SATA can be attached and detached only while the VM is stopped")
)

// AttachedDisk is a disk in the record of a running VM.
type AttachedDisk struct {
	Disk
	// Present is false if QEMU does not have the device. QEMU may then still have the disk's block nodes and open
	// files, which UnplugDisk removes.
	Present bool
	// Size is the size in bytes that the guest sees, or 0 if it is not known.
	Size       uint64
	Flattening Flattening
}

// Disks returns all disks in the record, in the order of the record. It queries QEMU for which of them QEMU has a
// device, and for their sizes.
//
// If the VM has a disk with an RBD image, Disks takes the sizes of all disks from the record, because QEMU 7.2 reads
// from each image to answer the query for sizes, and hangs while the Ceph cluster does not answer. If the record has no
// size of a disk, Disks returns the size 1: the caller then calls ResizeDisk, which records the size. Disks does not
// set Flattening for such a VM.
func (p *Process) Disks(ctx context.Context) ([]AttachedDisk, error) {
	devices, err := p.devices(ctx)
	if err != nil {
		return nil, err
	}
	disks := p.Record().Spec.Disks
	if hasRBD(disks) {
		var out []AttachedDisk
		for _, d := range disks {
			out = append(out, AttachedDisk{Disk: d, Present: devices[d.deviceID()], Size: max(d.Size, 1)})
		}
		return out, nil
	}
	var nodes []struct {
		Node  string `json:"node-name"`
		Image struct {
			Size uint64 `json:"virtual-size"`
		} `json:"image"`
		Depth *int `json:"backing_file_depth"`
	}
	var jobs []streamJob
	err = p.call(ctx, p.inspect, func(ctx context.Context, conn *qmp.Conn) error {
		// If the argument flat is true, QEMU reports the depth 0 for every node.
		flat := !slices.ContainsFunc(disks, func(d Disk) bool { return d.Base != "" })
		if !flat {
			// The jobs are queried before the nodes, so that a job that ends between the two queries counts as running.
			if jobs, err = queryJobs(ctx, conn); err != nil {
				return err
			}
		}
		return conn.Do(ctx, "query-named-block-nodes", object{"flat": flat}, &nodes)
	})
	if err != nil {
		return nil, err
	}
	sizes, depths := map[string]uint64{}, map[string]*int{}
	for _, n := range nodes {
		sizes[n.Node], depths[n.Node] = n.Image.Size, n.Depth
	}
	var out []AttachedDisk
	for _, d := range disks {
		depth := 1 // If QEMU has no overlay node, nothing was copied.
		if known := depths[d.overlayNode()]; known != nil {
			depth = *known
		}
		f := flatteningOf(d, jobs, depth)
		f.Waiting = d.Base != "" && p.copying.Load()
		out = append(out, AttachedDisk{Disk: d, Present: devices[d.deviceID()], Size: sizes[d.node()], Flattening: f})
	}
	return out, nil
}

// PlugDisk attaches a disk to the running guest, and writes it to the record. QEMU gets duplicates of the files, which
// the caller must still close. If the slot of d is -1, PlugDisk chooses the first free slot. PlugDisk returns when the
// guest's machine has the device. The error wraps [ErrNotPluggable] or [ErrNoDiskSlot] if the disk cannot be attached
// before the next start. If the record contains the disk after an error, QEMU may have its files, and the caller must
// call UnplugDisk.
func (p *Process) PlugDisk(ctx context.Context, d Disk, files Layers) error {
	if err := p.plugDisk(ctx, d, files); err != nil {
		return fmt.Errorf("attach disk %s: %w", d.ID, err)
	}
	return nil
}

func (p *Process) plugDisk(ctx context.Context, d Disk, files Layers) error {
	devices, err := p.devices(ctx)
	if err != nil {
		return err
	}
	if devices[d.deviceID()] {
		return nil // An earlier call was interrupted before it got the reply.
	}
	old := p.Record().Spec.Disks
	others := slices.DeleteFunc(slices.Clone(old), func(o Disk) bool { return o.ID == d.ID })
	if err := chooseSlot(&d, others, devices); err != nil {
		return err
	}
	all := append(slices.Clone(others), d)
	s := p.Record().Spec
	s.Disks = all
	if err := s.Validate(); err != nil {
		return err
	}
	if err := files.check(d); err != nil {
		return err
	}
	if d.RBD != nil && !p.Record().HostNetwork {
		return ErrNoNetwork
	}
	if err := p.writeDisks(all); err != nil {
		return err
	}
	if at := slices.IndexFunc(old, func(o Disk) bool { return o.ID == d.ID }); at >= 0 {
		// An earlier call may have left nodes without a device. Without an earlier call QEMU has none of the disk.
		err = p.deleteNodes(ctx, old[at])
	}
	if err == nil {
		err = p.addDisk(ctx, d, files)
	}
	if err == nil {
		return nil
	}
	var refusal *qmp.Error
	if errors.As(err, &refusal) {
		if cleanErr := p.deleteNodes(ctx, d); cleanErr != nil {
			return errors.Join(err, cleanErr)
		}
		err = errors.Join(err, p.writeDisks(others))
	}
	return err
}

// chooseSlot sets the slot of d if it is -1, and returns an error if a disk cannot be attached there. The parameter
// devices contains the ids of QEMU's devices.
func chooseSlot(d *Disk, others []Disk, devices map[string]bool) error {
	if d.Bus != Virtio && d.Bus != SCSI {
		return ErrNotPluggable
	}
	if len(others) >= maxDisks {
		return ErrNoDiskSlot
	}
	if d.Slot == -1 {
		taken := map[int]bool{}
		for _, o := range others {
			taken[o.Slot] = taken[o.Slot] || o.Bus == d.Bus
		}
		d.Slot = freeSlot(taken, slots[d.Bus])
	}
	if d.Slot < 0 || d.Bus == Virtio && !devices[portID(d.Slot)] || d.Bus == SCSI && !devices[scsiID] {
		return ErrNoDiskSlot
	}
	return nil
}

// addDisk adds the files, block nodes and device of a disk to QEMU.
func (p *Process) addDisk(ctx context.Context, d Disk, files Layers) error {
	if err := p.openDisk(ctx, d, files); err != nil {
		return err
	}
	if files.Confirm != nil {
		if err := files.Confirm(ctx); err != nil {
			return err
		}
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "device_add", d.device(), nil)
	})
}

// openDisk adds the files and block nodes of a disk to QEMU, which then has the disk open.
func (p *Process) openDisk(ctx context.Context, d Disk, files Layers) error {
	if d.RBD != nil {
		return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			return addNodes(ctx, conn, d, diskSets{}, files.Keys)
		})
	}
	if err := p.raiseFileLimit(files.Size); err != nil {
		return err
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		var sets diskSets
		var err error
		if sets.overlay, err = p.newFDSets(ctx, conn, 2); err != nil {
			return err
		}
		sets.base = sets.overlay + 1
		if _, err := conn.AddFD(ctx, sets.overlay, d.node(), files.Overlay); err != nil {
			return err
		}
		if files.Base != nil {
			if _, err := conn.AddFD(ctx, sets.base, d.baseNode(), files.Base); err != nil {
				return err
			}
		}
		return addNodes(ctx, conn, d, sets, files.Keys)
	})
}

// UnplugDisk removes a disk from the running guest. It asks the guest repeatedly, for at most 5 seconds, to release the
// disk. The error wraps [ErrDiskNotReleased] if the guest does not release it. After the release, UnplugDisk cancels a
// copy (CopyDisks) or a flattening (FlattenDisk) of the disk, and makes QEMU flush and close the files. Then UnplugDisk
// calls release. If release returns nil, UnplugDisk removes the disk from the record. UnplugDisk may be called again
// after any error.
func (p *Process) UnplugDisk(ctx context.Context, id string, release func(Disk) error) error {
	if err := p.unplugDisk(ctx, id, release); err != nil {
		return fmt.Errorf("detach disk %s: %w", id, err)
	}
	return nil
}

func (p *Process) unplugDisk(ctx context.Context, id string, release func(Disk) error) error {
	disks := p.Record().Spec.Disks
	at := slices.IndexFunc(disks, func(d Disk) bool { return d.ID == id })
	if at < 0 {
		return nil
	}
	if disks[at].Bus != Virtio && disks[at].Bus != SCSI {
		return ErrNotPluggable
	}
	released, err := p.deleteDevice(ctx, disks[at].deviceID(), p.diskReleaseWithin)
	if err == nil && !released {
		err = ErrDiskNotReleased
	}
	if err != nil {
		return err
	}
	if err := p.cancelCopy(ctx, disks[at]); err != nil {
		return err
	}
	if err := p.deleteNodes(ctx, disks[at]); err != nil {
		return err
	}
	if err := release(disks[at]); err != nil {
		return err
	}
	return p.writeDisks(slices.Delete(slices.Clone(disks), at, at+1))
}

// deleteNodes deletes the block nodes, throttle group and descriptor sets that QEMU has of a disk without a device.
// QEMU then writes its caches and closes the files. deleteNodes repeats the deletion of a node until QEMU has ended the
// node's I/O.
func (p *Process) deleteNodes(ctx context.Context, d Disk) error {
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if d.Base != "" {
			if err := cancelJob(ctx, conn, d.flattenJob()); err != nil {
				return err
			}
		}
		nodes, err := queryNodes(ctx, conn)
		if err != nil {
			return err
		}
		for _, name := range []string{d.node(), d.formatNode(), d.fileNode(), d.baseNode(), d.baseFile()} {
			if !slices.Contains(nodes, name) {
				continue
			}
			if err := deleteNode(ctx, conn, name); err != nil {
				return err
			}
		}
		if d.limited() {
			if err := deleteObject(ctx, conn, d.groupID()); err != nil {
				return err
			}
		}
		if d.hasKey() {
			if err := deleteObject(ctx, conn, d.secretID()); err != nil {
				return err
			}
		}
		return removeFDSets(ctx, conn, d.node(), d.baseNode())
	})
}

// queryNodes returns the names of all block nodes. Unlike query-named-block-nodes and query-block, this query reads
// from no image, so QEMU answers it while a Ceph cluster is away (see Disks).
func queryNodes(ctx context.Context, conn *qmp.Conn) (names []string, err error) {
	var nodes []struct {
		Node string `json:"node-name"`
	}
	err = conn.Do(ctx, "query-blockstats", object{"query-nodes": true}, &nodes)
	for _, n := range nodes {
		names = append(names, n.Node)
	}
	return names, err
}

// deleteObject removes an object from QEMU. An object that does not exist is no error.
func deleteObject(ctx context.Context, conn *qmp.Conn, id string) error {
	err := conn.Do(ctx, "object-del", object{"id": id}, nil)
	var refusal *qmp.Error
	if errors.As(err, &refusal) && strings.Contains(refusal.Desc, "not found") {
		return nil
	}
	return err
}

func deleteNode(ctx context.Context, conn *qmp.Conn, name string) error {
	late, cancel := context.WithTimeout(ctx, nodeBusyTimeout)
	defer cancel()
	for {
		err := conn.Do(ctx, "blockdev-del", object{"node-name": name}, nil)
		var refusal *qmp.Error
		switch {
		case err == nil:
			return nil
		case !errors.As(err, &refusal):
			return err
		case strings.Contains(refusal.Desc, "Failed to find"):
			return nil
		}
		if pause(late, nodeBusyPause); late.Err() != nil {
			return err
		}
	}
}

// SetGeneration writes to the record that QEMU has the volume of a disk open for the attachment with this generation, and
// that QEMU may write to the volume.
func (p *Process) SetGeneration(disk string, generation uint64) error {
	disks := slices.Clone(p.Record().Spec.Disks)
	at := slices.IndexFunc(disks, func(d Disk) bool { return d.ID == disk })
	if at < 0 {
		return fmt.Errorf("the VM has no disk %s", disk)
	}
	disks[at].Generation, disks[at].Standby = generation, false
	return p.writeDisks(disks)
}

// writeDisks replaces the disks in the record.
func (p *Process) writeDisks(disks []Disk) error {
	p.layout.Lock()
	defer p.layout.Unlock()
	r := p.Record()
	r.Spec.Disks = disks
	if err := p.home.write("record.json", r); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.record.Spec.Disks = disks
	return nil
}
