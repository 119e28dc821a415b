package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

const (
	// rbdClass is the storage class of RBD volumes.
	rbdClass = "ceph"
	// baseImage and baseSnapshot are the image and the snapshot that are cloned by hand.
	baseImage, baseSnapshot = "base", "base@original"
)

// rbdImage is an RBD image that a QEMU started by hand gets as a disk.
type rbdImage struct {
	ceph *rbdtest.Ceph
	name string
}

func (i rbdImage) nodes(slot int) []object {
	cache := object{"direct": true, "no-flush": false}
	return []object{
		{"driver": "rbd", "node-name": node(slot) + "-file", "pool": rbdtest.Pool, "image": i.name, "conf": i.ceph.Conf,
			"cache": cache, "discard": "unmap"},
		{"driver": "raw", "node-name": node(slot), "file": node(slot) + "-file", "cache": cache, "discard": "unmap"},
	}
}

// rbdPeer does by hand in the Ceph cluster what Trivet does.
type rbdPeer struct{ ceph *rbdtest.Ceph }

// rbd runs rbd(8).
func (r rbdPeer) rbd(ctx context.Context, args ...string) error {
	_, _, err := run(ctx, []string{"CEPH_CONF=" + r.ceph.Conf}, "rbd", args...)
	return err
}

// path returns the name of an image with its pool.
func (r rbdPeer) path(image string) string { return rbdtest.Pool + "/" + image }

// measureRBD measures volumes in a Ceph cluster that it starts.
func measureRBD(ctx context.Context, s *site) (err error) {
	if _, err := os.Stat(s.rbdHelper); err != nil {
		return fmt.Errorf("not available: %w", err)
	}
	ceph, fixture, err := startCeph(ctx)
	defer func() { err = errors.Join(err, fixture.close()) }()
	if err != nil {
		return fmt.Errorf("start Ceph: %w", err)
	}
	p, err := s.pair(ctx, 0)
	if err != nil {
		return err
	}
	_, err = storagev1.NewStorageClassServiceClient(s.cloud.Admin.Conn()).CreateStorageClass(ctx, &storagev1.CreateStorageClassRequest{
		Name: rbdClass, Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_RBD, Rbd: &storagev1.RbdPool{
			Fsid: ceph.FSID, Monitors: []string{ceph.Address}, Pool: rbdtest.Pool, User: rbdtest.User, Key: ceph.Key,
		},
	})
	if err != nil {
		return fmt.Errorf("not available: %w", err)
	}
	peer := rbdPeer{ceph}
	if err := peer.importBase(ctx, s); err != nil {
		return err
	}
	if err := s.measureRBDClones(ctx, p, peer); err != nil {
		return fmt.Errorf("clone: %w", err)
	}
	return s.measureRBDLoads(ctx, p, peer)
}

// importBase makes the image that is cloned by hand, from the same file as Trivet's image.
func (r rbdPeer) importBase(ctx context.Context, s *site) error {
	raw := filepath.Join(s.dir, "base.raw")
	if _, _, err := run(ctx, nil, "qemu-img", "convert", "-O", "raw", filepath.Join(s.guest, "disk.qcow2"), raw); err != nil {
		return err
	}
	defer os.Remove(raw)
	return errors.Join(r.rbd(ctx, "import", "--no-progress", raw, r.path(baseImage)),
		r.rbd(ctx, "snap", "create", "--no-progress", r.path(baseSnapshot)), r.rbd(ctx, "snap", "protect", r.path(baseSnapshot)))
}

// createRBDVolume creates a volume in the Ceph cluster, from an image unless it is "", and waits until a host has made
// it.
func (s *site) createRBDVolume(ctx context.Context, image string) (string, error) {
	v, err := s.cloud.Admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{
		Name: s.volumeName(), OrgId: onehost.Org, ProjectId: project, SizeGib: 1, ImageId: image,
		StorageClass: rbdClass,
	})
	for err == nil && v.GetStatus() != vmv1.VolumeStatus_VOLUME_STATUS_AVAILABLE {
		if v.GetStatus() == vmv1.VolumeStatus_VOLUME_STATUS_ERROR {
			return "", fmt.Errorf("the volume is in ERROR: %s", v.GetMetadata()["trivet/error"])
		}
		select {
		case <-time.After(pollInterval):
		case <-ctx.Done():
			return "", ctx.Err()
		}
		v, err = s.cloud.Admin.Volumes.GetVolume(ctx, &vmv1.GetVolumeRequest{OrgId: onehost.Org, ProjectId: project, VolumeId: v.GetId()})
	}
	return v.GetId(), err
}

// measureRBDClones measures how long it takes until a running guest has read the first bytes of a new RBD volume that
// was made from an image. A first clone, which does not count, makes Trivet import the image into the cluster.
func (s *site) measureRBDClones(ctx context.Context, p *pair, peer rbdPeer) error {
	ours := func(int) (took cloned, err error) {
		began := time.Now()
		volume, err := s.createRBDVolume(ctx, s.images.Disk)
		if err != nil {
			return took, err
		}
		if err := s.attach(ctx, p.ours, "rbd", volume); err != nil {
			return took, err
		}
		took.attached = time.Since(began)
		if err := p.ours.awaitRead(ctx, "vdb"); err != nil {
			return took, err
		}
		took.read = time.Since(began)
		return took, errors.Join(s.detach(ctx, p.ours, "rbd"), s.deleteVolume(ctx, volume))
	}
	byHand := func(round int) (took cloned, err error) {
		image := rbdImage{peer.ceph, fmt.Sprintf("clone-%d", round)}
		began := time.Now()
		if err := peer.rbd(ctx, "clone", peer.path(baseSnapshot), peer.path(image.name)); err != nil {
			return took, err
		}
		if err := peer.rbd(ctx, "resize", "--no-progress", "--size", "1G", peer.path(image.name)); err != nil {
			return took, err
		}
		if err := p.hand.plug(ctx, 1, image); err != nil {
			return took, err
		}
		took.attached = time.Since(began)
		if err := p.hand.awaitRead(ctx, "vdb"); err != nil {
			return took, err
		}
		took.read = time.Since(began)
		return took, errors.Join(p.hand.unplug(ctx, 1, image), peer.rbd(ctx, "rm", "--no-progress", peer.path(image.name)))
	}
	if _, err := ours(0); err != nil {
		return err
	}
	return s.measureClones(ctx, "rbd clone", ours, byHand)
}

// measureRBDLoads measures I/O on an RBD volume.
func (s *site) measureRBDLoads(ctx context.Context, p *pair, peer rbdPeer) error {
	volume, err := s.createRBDVolume(ctx, "")
	if err != nil {
		return err
	}
	if err := s.attach(ctx, p.ours, "rbd", volume); err != nil {
		return err
	}
	image := rbdImage{peer.ceph, "data"}
	if err := peer.rbd(ctx, "create", "--size", "1G", peer.path(image.name)); err != nil {
		return err
	}
	if err := p.hand.plug(ctx, 1, image); err != nil {
		return err
	}
	if err := errors.Join(p.ours.awaitRead(ctx, "vdb"), p.hand.awaitRead(ctx, "vdb")); err != nil {
		return err
	}
	if err := s.measureLoads(ctx, p, "vdb", "rbd "); err != nil {
		return err
	}
	return errors.Join(p.hand.unplug(ctx, 1, image), s.detach(ctx, p.ours, "rbd"), s.deleteVolume(ctx, volume))
}
