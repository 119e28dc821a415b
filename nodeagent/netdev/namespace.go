package netdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// reservedID is no valid VPC ID: package edge names its namespace with it and the same prefix.
const reservedID = "edge"

// namespaceDir is where ip-netns(8) mounts namespaces.
const namespaceDir = "/run/netns"

// Path returns the path of a VPC's network namespace. The file exists between the first Prepare and Remove.
func (h *Host) Path(id cloud.VPCID) string { return filepath.Join(namespaceDir, h.Namespace(id)) }

// Namespace returns the name of a VPC's network namespace, as ip-netns(8) shows it.
func (h *Host) Namespace(id cloud.VPCID) string { return h.opts.Prefix + string(id) }

// List returns the sorted IDs of all VPCs that have a namespace on the host, among them those of which a Remove was
// interrupted. The namespace of package edge is none of them.
func (h *Host) List() ([]cloud.VPCID, error) {
	entries, err := os.ReadDir(namespaceDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var ids []cloud.VPCID
	for _, e := range entries {
		if id, ok := strings.CutPrefix(e.Name(), h.opts.Prefix); ok && validID.MatchString(id) && id != reservedID {
			ids = append(ids, cloud.VPCID(id))
		}
	}
	slices.Sort(ids)
	return ids, nil
}

// Remove deletes the devices of a VPC and its namespace. A VPC without a namespace is no error. Remove waits for one
// RCU grace period, 20 to 30 ms. Processes that still have sockets in the namespace keep it in existence, but without
// the VPC's devices. A tap that a VM has open becomes unusable.
func (h *Host) Remove(ctx context.Context, id cloud.VPCID) error {
	if err := h.remove(ctx, id); err != nil {
		return fmt.Errorf("remove VPC %s: %w", id, err)
	}
	return nil
}

func (h *Host) remove(ctx context.Context, id cloud.VPCID) error {
	unlock, err := h.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	mounted, err := nsthread.Exists(h.Path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !mounted {
		return os.Remove(h.Path(id))
	}
	err = h.enter(ctx, id, func(k *kernel) error {
		have := newState()
		if err := k.readLinks(have); err != nil {
			return err
		}
		delete(have.links, loopback) // the loopback device ends with the namespace
		return k.deleteLinks(have.linksInOrder())
	})
	if err != nil {
		return err
	}
	return netns.DeleteNamed(h.Namespace(id))
}

// createNamespace makes the namespace of a VPC and returns the change, or nil if the namespace exists.
func (h *Host) createNamespace(id cloud.VPCID) (Change, error) {
	if n := len(h.Namespace(id)); n > maxFileName {
		return nil, fmt.Errorf("the namespace's name would have %d bytes; the limit is %d", n, maxFileName)
	}
	created, err := nsthread.Create(h.Namespace(id))
	if err != nil || !created {
		return nil, err
	}
	return addNamespace{h.Namespace(id)}, nil
}
