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
)

// keepEvery is how often the assignment is written at most. Every delta would be an fsync in the way of every start.
const keepEvery = time.Second

// kept holds the last whole assignment on disk, a little behind, and the highest term, never behind: what a lower term
// says must be dropped also by an agent that has just started. A disk that is full stops neither: the agent goes on by
// what it remembers, since it is what can make room.
type kept struct {
	dir  string
	log  *slog.Logger
	wake chan struct{} // capacity 1

	mu    sync.Mutex // guards what follows
	term  uint64
	newer *Assignment // not yet on disk
}

// openKept reads what an earlier run left; the assignment is nil when there is none.
func openKept(dir string, log *slog.Logger) (*kept, *Assignment, error) {
	k := &kept{dir: dir, log: log, wake: make(chan struct{}, 1)}
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

// raise notes a term that was seen. When it returns, the term is on disk, if that takes it.
func (k *kept) raise(term uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if term <= k.term {
		return
	}
	k.term = term
	if err := replace(k.dir, termFile, []byte(strconv.FormatUint(term, 10)+"\n")); err != nil {
		k.log.Warn("term not kept", "err", err)
	}
}

// put notes a new assignment, to be written soon.
func (k *kept) put(a *Assignment) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.newer = a
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// run writes what was put, until ctx ends, and then once more.
func (k *kept) run(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-k.wake:
		case <-ctx.Done():
		}
		if err := k.write(); err != nil {
			k.log.Warn("assignment not kept", "err", err)
		}
		select {
		case <-time.After(keepEvery):
		case <-ctx.Done():
		}
	}
}

// write brings the newest assignment to disk. One that fails is left to the next that is put.
func (k *kept) write() error {
	k.mu.Lock()
	a := k.newer
	k.newer = nil
	k.mu.Unlock()
	if a == nil {
		return nil
	}
	m := &agentv1.WatchResponse{Term: a.Term, Revision: a.Revision, Complete: true, Images: a.Images}
	for _, id := range slices.Sorted(maps.Keys(a.VMs)) {
		m.Vms = append(m.Vms, a.VMs[id])
	}
	return store(k.dir, assignmentFile, m)
}

// forget drops everything: it was another node's.
func (k *kept) forget() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.term, k.newer = 0, nil
	for _, name := range []string{assignmentFile, termFile} {
		if err := os.Remove(filepath.Join(k.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("forget %s: %w", name, err)
		}
	}
	return nil
}

// What the directory keeps. A reader that meets a damaged file refuses to start: none of them is ever half written.
const (
	keyFile        = "node.key"      // PKCS #8, PEM
	credentialFile = "credential.pb" // agent.v1.Credential
	assignmentFile = "assignment.pb" // agent.v1.WatchResponse, whole
	termFile       = "term"          // highest raft term seen, decimal
)

// replace writes a file so that after a crash it is the old one or the new one.
func replace(dir, name string, data []byte) error {
	f, err := os.CreateTemp(dir, "."+name+"-*") // 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", name, err)
	}
	if err := os.Rename(f.Name(), filepath.Join(dir, name)); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync directory of %s: %w", name, err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync directory of %s: %w", name, err)
	}
	return nil
}

// load reads a message; it reports false when there is no such file.
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
	return replace(dir, name, data)
}
