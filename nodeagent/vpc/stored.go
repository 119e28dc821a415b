package vpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// storeInterval is the shortest time between two writes of the file of a VPC.
	storeInterval = time.Second
	// maxStored is the size in bytes above which the state of a VPC is not stored.
	maxStored = 32 << 20
	// restoreTimeout limits how long the start of the servers of all stored VPCs takes.
	restoreTimeout = 20 * time.Second
	storedSuffix   = ".json"
)

// storedVPC is the content of a file in Options.Dir: the data that the DHCP, DNS and metadata servers of a VPC need. A
// restarted agent serves from the file until the control plane has sent the VPC. The file has no other use.
//
// The file is as old as the last update before the agent stopped, so the servers may give names and addresses that have
// changed since. Forwarding state is in the kernel and is not read from the file. Of the VPC, the file has only the ID,
// the MTU, the prefixes, the subnets with their ports, and the names and addresses of the service IPs.
type storedVPC struct {
	VPC    cloud.HostVPC
	Domain string
	// Devices are the IDs of the VMs or containers that have the ports on this host.
	Devices map[cloud.PortID]string
}

// restoredVPC is a VPC that is served from a file.
type restoredVPC struct {
	*worker // without a goroutine
	devices map[cloud.PortID]string
}

// markUnsaved makes the store write or remove the file of a VPC. The caller holds mu.
func (n *Networks) markUnsaved(id cloud.VPCID) {
	if n.o.Dir == "" || cloud.CheckUUID("id", string(id)) != nil {
		return
	}
	n.unsaved[id] = true
	select {
	case n.saveSoon <- struct{}{}:
	default:
	}
}

// store writes the files of VPCs that have changed, until Close.
func (n *Networks) store() {
	for {
		select {
		case <-n.saveSoon:
		case <-n.ctx.Done():
			n.save()
			return
		}
		select {
		case <-time.After(storeInterval):
		case <-n.ctx.Done():
		}
		n.save()
	}
}

// save writes or removes the files of the VPCs in n.unsaved. Only store calls it.
func (n *Networks) save() {
	n.mu.Lock()
	ids := slices.Sorted(maps.Keys(n.unsaved))
	clear(n.unsaved)
	n.mu.Unlock()
	for _, id := range ids {
		if err := n.saveVPC(id); err != nil {
			n.o.Log.Warn("cannot store a VPC: it is not served if the agent restarts without the control plane",
				"vpc", id, "err", err)
		}
	}
}

func (n *Networks) saveVPC(id cloud.VPCID) error {
	path := filepath.Join(n.o.Dir, string(id)+storedSuffix)
	n.mu.RLock()
	w := n.workers[id]
	if w == nil || w.inForce == nil {
		n.mu.RUnlock()
		return remove(path)
	}
	s := storedVPC{VPC: servedPart(&w.inForce.HostVPC), Domain: w.inForce.Domain, Devices: map[cloud.PortID]string{}}
	for port := range w.ports {
		s.Devices[port] = n.device(port)
	}
	n.mu.RUnlock()
	content, err := json.Marshal(&s)
	if err != nil {
		return err
	}
	if len(content) > maxStored {
		return errors.Join(remove(path), fmt.Errorf("its state has %d bytes, more than %d", len(content), maxStored))
	}
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
		return nil
	}
	return atomicfile.WriteFile(path, content, 0o600)
}

// servedPart returns the part of a VPC that its servers need.
func servedPart(v *cloud.HostVPC) cloud.HostVPC {
	out := cloud.HostVPC{
		ID: v.ID, MTU: v.MTU, CIDR: v.CIDR, CIDR6: v.CIDR6, Subnets: slices.Clone(v.Subnets),
	}
	for i := range out.Subnets {
		out.Subnets[i].Routes = nil
	}
	for _, s := range v.Services {
		out.Services = append(out.Services, cloud.HostService{ID: s.ID, Name: s.Name, Address: s.Address})
	}
	return out
}

// remove deletes a file that may not exist.
func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// restore starts the DHCP, DNS and metadata servers of the stored VPCs that still have a namespace on the host, and
// removes the files of the others. After an error of one VPC it continues with the next one. New calls restore before
// the first update.
func (n *Networks) restore() error {
	if err := os.MkdirAll(n.o.Dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(n.o.Dir)
	if err != nil {
		return err
	}
	existing, err := n.plane.list()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(n.ctx, restoreTimeout)
	defer cancel()
	for _, e := range entries {
		name, isVPC := strings.CutSuffix(e.Name(), storedSuffix)
		id := cloud.VPCID(name)
		if !isVPC {
			continue
		}
		path := filepath.Join(n.o.Dir, e.Name())
		if !slices.Contains(existing, id) {
			err = remove(path)
		} else {
			err = n.restoreVPC(ctx, path, id)
		}
		if err != nil {
			n.o.Log.Warn("a stored VPC has no DHCP, DNS and metadata until the control plane sends it", "vpc", id, "err", err)
		}
	}
	return nil
}

func (n *Networks) restoreVPC(ctx context.Context, path string, id cloud.VPCID) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Size() > maxStored {
		return fmt.Errorf("%s has %d bytes, more than %d", path, info.Size(), maxStored)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var s storedVPC
	if err := json.Unmarshal(content, &s); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if s.VPC.ID != id {
		return fmt.Errorf("%s has the state of VPC %q", path, s.VPC.ID)
	}
	want := &wanted{HostVPC: s.VPC, Domain: s.Domain}
	if err := n.plane.serve(ctx, want); err != nil {
		return err
	}
	r := &restoredVPC{worker: &worker{id: id}, devices: s.Devices}
	n.mu.Lock()
	defer n.mu.Unlock()
	r.setInForce(want)
	n.restored[id] = r
	return nil
}

// served returns the state from which the servers of a VPC answer, and the ports' devices if the state was restored.
// The result is nil without such a state. The caller holds mu.
func (n *Networks) served(id cloud.VPCID) (w *worker, devices map[cloud.PortID]string) {
	if w = n.workers[id]; w != nil && w.inForce != nil {
		return w, nil
	}
	if r := n.restored[id]; r != nil {
		return r.worker, r.devices
	}
	return nil, nil
}
