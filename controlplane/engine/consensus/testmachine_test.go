package consensus

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// testMachine is a state machine of "key=value" proposals, which it stores in order. Flush writes the state to one file
// and syncs it; Apply writes nothing.
type testMachine struct {
	fs  vfs.FS
	dir string
	testMachineState

	batches       []int // number of entries in each call of Apply
	wanted        int   // number of entries with Entry.Wanted
	applyErr      error
	restoreErr    error
	checkpointErr error
	restored      func() // called at the end of Restore
	checkpointing func() // called at the begin of Checkpoint
}

type testMachineState struct {
	Index, Term uint64
	Log         []string          // every applied proposal, in order
	Values      map[string]string // the newest value of each key
}

func openTestMachine(fs vfs.FS, dir string) (*testMachine, error) {
	m := &testMachine{fs: fs, dir: dir, testMachineState: testMachineState{Values: map[string]string{}}}
	if err := makeDir(fs, dir); err != nil {
		return nil, err
	}
	if _, err := fs.Stat(fs.PathJoin(dir, "state")); err != nil {
		return m, nil
	}
	return m, m.read(fs.PathJoin(dir, "state"))
}

// makeDir durably creates a directory and its parents.
func makeDir(fs vfs.FS, dir string) error {
	if err := fs.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	for ; ; dir = fs.PathDir(dir) {
		if err := syncDir(fs, dir); err != nil {
			return err
		}
		if dir == fs.PathDir(dir) {
			return nil
		}
	}
}

func syncDir(fs vfs.FS, dir string) error {
	d, err := fs.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (m *testMachine) read(name string) error {
	f, err := m.fs.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	m.testMachineState = testMachineState{Values: map[string]string{}}
	return json.Unmarshal(b, &m.testMachineState)
}

func (m *testMachine) write(dir string) error {
	b, err := json.Marshal(&m.testMachineState)
	if err != nil {
		return err
	}
	tmp := m.fs.PathJoin(dir, "tmp")
	f, err := m.fs.Create(tmp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Sync(), f.Close(), m.fs.Rename(tmp, m.fs.PathJoin(dir, "state"))); err != nil {
		return err
	}
	return syncDir(m.fs, dir)
}

func (m *testMachine) Apply(entries []Entry) ([]any, error) {
	if m.applyErr != nil {
		return nil, m.applyErr
	}
	m.batches = append(m.batches, len(entries))
	var results []any
	for i, e := range entries {
		packed := i > 0 && e.Index == m.Index && e.ID == [16]byte{}
		if e.Index <= m.Index && !packed || e.Term < m.Term {
			return nil, fmt.Errorf("entry %d of term %d is applied after entry %d of term %d", e.Index, e.Term, m.Index, m.Term)
		}
		m.Index, m.Term = e.Index, e.Term
		if e.Wanted {
			m.wanted++
		}
		key, value, _ := strings.Cut(string(e.Data), "=")
		results = append(results, fmt.Sprintf("%s was %q", key, m.Values[key]))
		m.Log = append(m.Log, string(e.Data))
		m.Values[key] = value
	}
	return results, nil
}

func (m *testMachine) Applied() (uint64, uint64) { return m.Index, m.Term }

func (m *testMachine) Flush() (uint64, error) {
	if err := m.write(m.dir); err != nil {
		return 0, err
	}
	return m.Index, nil
}

func (m *testMachine) Checkpoint(dir string) (uint64, uint64, error) {
	if m.checkpointing != nil {
		m.checkpointing()
	}
	if m.checkpointErr != nil {
		return 0, 0, m.checkpointErr
	}
	return m.Index, m.Term, m.write(dir)
}

func (m *testMachine) Restore(dir string) error {
	if m.restoreErr != nil {
		return m.restoreErr
	}
	if err := m.read(m.fs.PathJoin(dir, "state")); err != nil {
		return err
	}
	if err := m.write(m.dir); err != nil {
		return err
	}
	if m.restored != nil {
		m.restored()
	}
	return nil
}
