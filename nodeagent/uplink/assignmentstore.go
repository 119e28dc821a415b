package uplink

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// writeInterval is the minimum interval between two writes of the assignment. Writing each delta would delay every VM
// start by an fsync.
const writeInterval = time.Second

// assignmentStore stores the last complete assignment and the highest raft term on disk. It writes an assignment
// asynchronously. It writes a term before a message with that term is delivered, because an agent that has just started
// must also drop messages of a lower term. If the disk is full, the agent continues with the values in memory, because
// only the agent can free space.
type assignmentStore struct {
	dir  string
	log  *slog.Logger
	wake chan struct{} // capacity 1

	writing   sync.Mutex // locked while the assignment is written or removed; locked before mu
	mu        sync.Mutex // guards the fields below
	term      uint64
	unwritten *Assignment // the newest assignment, if it is not yet on disk
}

// openAssignmentStore returns the store in dir and the assignment in it, or a nil assignment if there is none.
func openAssignmentStore(dir string, log *slog.Logger) (*assignmentStore, *Assignment, error) {
	k := &assignmentStore{dir: dir, log: log, wake: make(chan struct{}, 1)}
	text, err := os.ReadFile(filepath.Join(dir, termFile))
	if errors.Is(err, fs.ErrNotExist) {
		return k, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read %s: %w", termFile, err)
	}
	if k.term, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err != nil {
		return nil, nil, fmt.Errorf("%s is damaged: %w", filepath.Join(dir, termFile), err)
	}
	var m agentv1.WatchResponse
	ok, err := load(dir, assignmentFile, &m)
	if err != nil || !ok {
		return k, nil, err
	}
	if !m.GetComplete() {
		return nil, nil, fmt.Errorf("%s is damaged: it is not complete", filepath.Join(dir, assignmentFile))
	}
	a, err := new(assembly).add(&m)
	if err != nil {
		return nil, nil, fmt.Errorf("%s is damaged: %w", filepath.Join(dir, assignmentFile), err)
	}
	return k, a, nil
}

// raiseTerm is called with the raft term of each received message. If the term is higher than k.term, raiseTerm sets
// k.term to it and writes it to disk before it returns. A write error is only logged.
func (k *assignmentStore) raiseTerm(term uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if term <= k.term {
		return
	}
	k.term = term
	if err := atomicfile.WriteFile(filepath.Join(k.dir, termFile), []byte(strconv.FormatUint(term, 10)+"\n"), 0o600); err != nil {
		k.log.Warn("cannot store the term", "err", err)
	}
}

// highestTerm returns the highest term that raiseTerm was called with.
func (k *assignmentStore) highestTerm() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.term
}

// put stores the assignment in memory; the method run writes it to disk later. put does not block.
func (k *assignmentStore) put(a *Assignment) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.unwritten = a
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// run writes the assignments passed to put, at most one every writeInterval, until ctx ends. It then writes the last
// one.
func (k *assignmentStore) run(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-k.wake:
		case <-ctx.Done():
		}
		if err := k.write(); err != nil {
			k.log.Warn("cannot store the assignment", "err", err)
		}
		select {
		case <-time.After(writeInterval):
		case <-ctx.Done():
		}
	}
}

// write writes the newest assignment to disk, without the keys of volumes. It does nothing if the newest assignment is
// on disk already. If the write fails, write does not try this assignment again. The next call of put provides a new
// assignment to write.
func (k *assignmentStore) write() error {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	a := k.unwritten
	k.unwritten = nil
	k.mu.Unlock()
	if a == nil {
		return nil
	}
	m := &agentv1.WatchResponse{Term: a.Term, Revision: a.Revision, Complete: true, Images: a.Images}
	for _, id := range slices.Sorted(maps.Keys(a.VMs)) {
		m.Vms = append(m.Vms, withoutDiskKeys(a.VMs[id]))
	}
	for _, id := range slices.Sorted(maps.Keys(a.Volumes)) {
		m.Volumes = append(m.Volumes, withoutKey(a.Volumes[id]))
	}
	return store(k.dir, assignmentFile, m)
}

// hasKey reports whether v contains an encryption key or the key of a Ceph user.
func hasKey(v *agentv1.AssignedVolume) bool {
	return len(v.GetEncryptionKey()) > 0 || v.GetRbd().GetKey() != ""
}

// withoutKey returns v without its encryption key and without the key of its Ceph user. It does not modify its
// argument. Keys are never written to disk: a person who steals the host's disks must not be able to read encrypted
// volumes or to connect to a Ceph cluster.
func withoutKey(v *agentv1.AssignedVolume) *agentv1.AssignedVolume {
	if !hasKey(v) || mutant.On(mutant.StoreVolumeKey) {
		return v
	}
	v = proto.CloneOf(v)
	v.EncryptionKey = nil
	if v.Rbd != nil {
		v.Rbd.Key = ""
	}
	return v
}

// withoutDiskKeys applies withoutKey to the volumes in the disks of a VM. Members of this version send no keys there,
// but members of another version may.
func withoutDiskKeys(vm *agentv1.AssignedVm) *agentv1.AssignedVm {
	if !slices.ContainsFunc(vm.GetDisks(), func(d *agentv1.AssignedDisk) bool { return hasKey(d.GetVolume()) }) {
		return vm
	}
	vm = proto.CloneOf(vm)
	for _, d := range vm.GetDisks() {
		if hasKey(d.GetVolume()) {
			d.Volume = withoutKey(d.GetVolume())
		}
	}
	return vm
}

// clear discards the term and the assignment, which belonged to another node identity. clear waits for a running write,
// because a write that ends after clear would store the old assignment again.
func (k *assignmentStore) clear() error {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.term, k.unwritten = 0, nil
	for _, name := range []string{assignmentFile, termFile} {
		if err := os.Remove(filepath.Join(k.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("forget %s: %w", name, err)
		}
	}
	return nil
}

// Names of the files in Options.Dir. They are written atomically, so a crash does not damage them. If one of them is
// damaged, the agent does not start.
const (
	keyFile        = "node.key"      // PKCS #8, PEM
	credentialFile = "credential.pb" // agent.v1.Credential
	assignmentFile = "assignment.pb" // a complete agent.v1.WatchResponse
	termFile       = "term"          // highest raft term seen, decimal
)

// load reads a message from a file. It returns false if the file does not exist.
func load(dir, name string, into proto.Message) (bool, error) {
	data, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read %s: %w", name, err)
	}
	if err := proto.Unmarshal(data, into); err != nil {
		return false, fmt.Errorf("%s is damaged: %w", filepath.Join(dir, name), err)
	}
	return true, nil
}

func store(dir, name string, m proto.Message) error {
	data, err := proto.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if err := atomicfile.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
