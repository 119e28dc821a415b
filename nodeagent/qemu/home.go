package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/console"
)

// Uids that VMs get, unless the agent's configuration says otherwise. No other program of the host may use them.
const (
	FirstUID = 600_000
	LastUID  = 665_535
)

// Homes are the directories of the VMs of this host, one a VM, named by its id.
//
// A VM has its uid from the making of its directory to the end of its removal, and another VM can get the same uid only
// afterwards, and while no process runs under it: whatever belongs to a uid belongs to one VM.
type Homes struct {
	dir         string
	first, last int
	mu          sync.Mutex // one choice of a uid at a time
}

// OpenHomes opens the directory of all homes, which is made if it is not there. first and last bound the uids.
func OpenHomes(dir string, first, last int) (*Homes, error) {
	if first < 1000 || last < first || last > 1<<31-2 {
		return nil, fmt.Errorf("open VM directories: uids %d to %d are not a range above 1000", first, last)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open VM directories: %w", err)
	}
	return &Homes{dir: dir, first: first, last: last}, nil
}

// List names the VMs that have a home, in order.
func (h *Homes) List() ([]string, error) {
	entries, err := os.ReadDir(h.dir)
	if err != nil {
		return nil, fmt.Errorf("list VM directories: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() && validUUID.MatchString(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// Open opens the home of a VM. The error wraps fs.ErrNotExist when it has none, or none that was finished.
func (h *Homes) Open(id string) (*Home, error) {
	if !validUUID.MatchString(id) {
		return nil, fmt.Errorf("open VM directory: %w", invalid("the id %q is not a UUID", id))
	}
	home := &Home{id: id, dir: filepath.Join(h.dir, id)}
	text, err := os.ReadFile(home.path("uid"))
	if err != nil {
		return nil, fmt.Errorf("open VM directory: %w", err)
	}
	if home.uid, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil || home.uid < 1000 {
		return nil, fmt.Errorf("open VM directory: %s does not hold a uid", home.path("uid"))
	}
	return home, nil
}

// Claim opens the home of a VM, and makes it if there is none.
func (h *Homes) Claim(id string) (*Home, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	home, err := h.Open(id)
	if !errors.Is(err, fs.ErrNotExist) {
		return home, err
	}
	uid, err := h.freeUID(id)
	if err != nil {
		return nil, fmt.Errorf("make VM directory: %w", err)
	}
	dir := filepath.Join(h.dir, id)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make VM directory: %w", err)
	}
	if err := syncDir(h.dir); err != nil {
		return nil, fmt.Errorf("make VM directory: %w", err)
	}
	if err := writeFile(filepath.Join(dir, "uid"), []byte(strconv.Itoa(uid)+"\n")); err != nil {
		return nil, fmt.Errorf("make VM directory: %w", err)
	}
	return &Home{id: id, dir: dir, uid: uid}, nil
}

// freeUID begins its search at a place that follows from the id, so that a uid is rarely used again soon.
func (h *Homes) freeUID(id string) (int, error) {
	used := map[int]bool{}
	ids, err := h.List()
	if err != nil {
		return 0, err
	}
	for _, other := range ids {
		home, err := h.Open(other)
		if errors.Is(err, fs.ErrNotExist) {
			continue // an agent ended between making the directory and choosing
		}
		if err != nil {
			return 0, err
		}
		used[home.uid] = true
	}
	if err := runningUIDs(used); err != nil {
		return 0, err
	}
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(id))
	n := h.last - h.first + 1
	for i := range n {
		if uid := h.first + (int(sum.Sum32())+i)%n; !used[uid] {
			return uid, nil
		}
	}
	return 0, fmt.Errorf("all uids from %d to %d are taken", h.first, h.last)
}

// runningUIDs adds the uids of all processes to used.
func runningUIDs(used map[int]bool) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		if st, err := e.Info(); err == nil {
			used[int(st.Sys().(*syscall.Stat_t).Uid)] = true
		}
	}
	return nil
}

// Home is the directory of one VM: 0700 and the agent's own. QEMU does not see it.
//
//	uid          the VM's uid, and gid
//	disks/       its disks: package disk
//	record.json  what was started last
//	asked        the end of that was asked for
//	exit.json    how that ended
//	console.log  what the guest wrote to its serial port
//	stderr.log   what QEMU said; stderr.log.old of the start before
//	*.sock       QEMU's listening sockets: work, inspect, console
type Home struct {
	id, dir string
	uid     int
}

// ID is the VM's.
func (h *Home) ID() string { return h.id }

// UID is the VM's, and also its gid.
func (h *Home) UID() int { return h.uid }

// Disks is the directory of its disks, for package disk. It is not made here.
func (h *Home) Disks() string { return h.path("disks") }

// Console is what its guest wrote to the serial port, over all its starts.
func (h *Home) Console() *console.Log { return console.At(h.path("console.log"), console.KeepConsole) }

func (h *Home) stderr() *console.Log { return console.At(h.path("stderr.log"), console.KeepStderr) }

// Names of the listening sockets.
const (
	workSocket    = "work.sock"
	inspectSocket = "inspect.sock"
	consoleSocket = "console.sock"
)

// Record is what was started, written before it was.
type Record struct {
	Generation uint64   `json:"generation"` // of the assignment that it was started for
	Owner      string   `json:"owner"`      // the caller's mark, at most 1 KiB
	Spec       Spec     `json:"spec"`       // with the slots that its disks got
	Argv       []string `json:"argv"`
	BootID     string   `json:"boot_id"` // of the host
	// Known once there is a process:
	PID       int       `json:"pid"`
	StartTime uint64    `json:"start_time"` // clock ticks since the host's boot, as in /proc/PID/stat: tells a reused pid
	Started   time.Time `json:"started"`
}

// Exit is how a QEMU ended.
type Exit struct {
	Reason Reason `json:"reason"`
	Text   string `json:"text"` // a sentence for people; it names no path of the host
}

// Reason is the kind of an Exit.
type Reason string

const (
	Guest   Reason = "guest"   // the guest powered itself off
	Asked   Reason = "asked"   // Powerdown, Cut or Kill
	Crashed Reason = "crashed" // anything else, or it never ran
)

// Record reads what was started last. The error wraps [ErrNotStarted] when nothing was.
func (h *Home) Record() (Record, error) {
	var r Record
	err := h.read("record.json", &r)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotStarted
	}
	if err != nil {
		return Record{}, fmt.Errorf("read record of VM %s: %w", h.id, err)
	}
	return r, nil
}

// Exit reads how what was started last has ended. False: it has not, or nobody has seen it yet ([Launcher.Adopt] looks).
func (h *Home) Exit() (Exit, bool, error) {
	var e Exit
	err := h.read("exit.json", &e)
	if errors.Is(err, fs.ErrNotExist) {
		return Exit{}, false, nil
	}
	if err != nil {
		return Exit{}, false, fmt.Errorf("read end of VM %s: %w", h.id, err)
	}
	return e, true, nil
}

// Remove removes the home and all in it, its uid last. The caller makes sure that no process runs; that there is no
// home any more is no error.
func (h *Home) Remove() error {
	entries, err := os.ReadDir(h.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove VM directory: %w", err)
	}
	for _, e := range entries {
		if e.Name() == "uid" {
			continue
		}
		if err := os.RemoveAll(h.path(e.Name())); err != nil {
			return fmt.Errorf("remove VM directory: %w", err)
		}
	}
	if err := os.RemoveAll(h.dir); err != nil {
		return fmt.Errorf("remove VM directory: %w", err)
	}
	return syncDir(filepath.Dir(h.dir))
}

func (h *Home) path(name string) string { return filepath.Join(h.dir, name) }

// begin makes room for a new start: what is known of the last one goes, but for its standard error.
func (h *Home) begin(r Record) error {
	for _, name := range []string{"exit.json", "asked", workSocket, inspectSocket, consoleSocket} {
		if err := os.Remove(h.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(h.path("stderr.log"), h.path("stderr.log.old")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return h.write("record.json", r)
}

// What was asked of a QEMU, for an agent that sees its end later.
const (
	askedNothing     = ""
	askedPowerButton = "powerdown"
	askedPowerOff    = "cut"
)

// setAsked notes that the end is wanted. It need not survive the host.
func (h *Home) setAsked(what string) error { return os.WriteFile(h.path("asked"), []byte(what), 0o600) }

func (h *Home) asked() string {
	what, err := os.ReadFile(h.path("asked"))
	if err != nil {
		return askedNothing
	}
	return string(what)
}

func (h *Home) read(name string, into any) error {
	text, err := os.ReadFile(h.path(name))
	if err != nil {
		return err
	}
	// Fields of a newer agent's are passed over: whoever goes back to this one must still find his guests.
	return json.Unmarshal(text, into)
}

func (h *Home) write(name string, from any) error {
	text, err := json.MarshalIndent(from, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(h.path(name), append(text, '\n'))
}

// writeFile writes a file whole or not at all, and it is there after a crash of the host.
func writeFile(path string, text []byte) error {
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
