package main

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// object is the arguments of a QMP command.
type object map[string]any

// backing is a file that a QEMU started by hand gets as a disk: a raw file, or a QCOW2 overlay of base.
type backing struct {
	path string
	base string // the path of a QCOW2 image; "" for a raw file
}

// disk is a disk that a QEMU started by hand can get.
type disk interface {
	// nodes returns the block nodes of the disk in slot. Each node comes after the nodes that it refers to. The last
	// one is the top node, and has the name node(slot).
	nodes(slot int) []object
}

// nodes returns the block nodes of the disk in slot, with the options that the agent uses for a volume with cache none.
// Each node comes after the nodes that it refers to.
func (b backing) nodes(slot int) (nodes []object) {
	cache := object{"direct": true, "no-flush": false}
	format := object{"driver": "raw", "node-name": node(slot), "file": node(slot) + "-file", "cache": cache, "discard": "unmap"}
	if b.base != "" {
		nodes = append(nodes,
			object{"driver": "file", "node-name": node(slot) + "-base-file", "filename": b.base, "read-only": true},
			object{"driver": "qcow2", "node-name": node(slot) + "-base", "file": node(slot) + "-base-file", "read-only": true, "backing": nil})
		format["driver"], format["backing"] = "qcow2", node(slot)+"-base"
	}
	return append(nodes,
		object{"driver": "file", "node-name": node(slot) + "-file", "filename": b.path, "cache": cache, "discard": "unmap"}, format)
}

func node(slot int) string { return fmt.Sprintf("hand%d", slot) }

// plug attaches a disk to a QEMU that was started by hand. slot is from 1 to hotPlugs. The disk with which QEMU was
// started has slot 0.
func (m *machine) plug(ctx context.Context, slot int, b disk) error {
	for _, n := range b.nodes(slot) {
		if err := m.qmp.Do(ctx, "blockdev-add", n, nil); err != nil {
			return err
		}
	}
	return m.qmp.Do(ctx, "device_add", object{
		"driver": "virtio-blk-pci", "id": node(slot) + "-device", "drive": node(slot), "bus": fmt.Sprintf("port%d", slot),
		"addr": "0x0", "write-cache": "on", "werror": "stop", "rerror": "stop",
	}, nil)
}

// unplug detaches a disk that plug attached.
func (m *machine) unplug(ctx context.Context, slot int, b disk) error {
	device := node(slot) + "-device"
	mark := m.qmp.Mark()
	if err := m.qmp.Do(ctx, "device_del", object{"id": device}, nil); err != nil {
		return err
	}
	_, err := m.qmp.Wait(ctx, mark, func(e qmp.Event) bool {
		var data struct{ Device string }
		return e.Name == "DEVICE_DELETED" && e.Decode(&data) == nil && data.Device == device
	})
	if err != nil {
		return err
	}
	nodes := b.nodes(slot)
	for i := range nodes {
		name := nodes[len(nodes)-1-i]["node-name"]
		if err := m.qmp.Do(ctx, "blockdev-del", object{"node-name": name}, nil); err != nil {
			return err
		}
	}
	return nil
}

// grow resizes the disk in slot.
func (m *machine) grow(ctx context.Context, slot int, size int64) error {
	return m.qmp.Do(ctx, "block_resize", object{"node-name": node(slot), "size": size}, nil)
}
