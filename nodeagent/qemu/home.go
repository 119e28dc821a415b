package qemu

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/console"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Default range of the VMs' uids. No other program of the host may use these.
const (
	FirstUID = 600_000
	LastUID  = 665_535
)

// Homes is the directory that holds the VMs' directories, named by their ids.
//
// A VM has a uid from the creation of its directory until the directory is removed. A VM with a TPM has a second uid
// for the TPM from its first start with a TPM on. Another VM can get a uid only after the directory is removed, and
// only if no process runs under the uid.
type Homes struct {
	dir         string
	first, last int
	mu          sync.Mutex // locked while a uid is chosen
}

// OpenHomes opens the directory that contains the VMs' home directories, and creates it if needed. The VMs get uids
// from first to last.
func OpenHomes(dir string, first, last int) (*Homes, error) {
	if first < 1000 || last < first || last > 1<<31-2 {
		return nil, fmt.Errorf("open VM directories: uids %d to %d are not a range above 1000", first, last)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open VM directories: %w", err)
	}
	return &Homes{dir: dir, first: first, last: last}, nil
}

// List returns the sorted ids of the VMs that have a home directory.
func (h *Homes) List() ([]string, error) {
	all, err := h.names()
	return slices.DeleteFunc(all, func(name string) bool { return !validUUID.MatchString(name) }), err
}

// path returns the path of a home directory.
func (h *Homes) path(name string) string { return filepath.Join(h.dir, name) }

// names returns the sorted names of all home directories: those of VMs, and those of formatting processes, which have
// the prefix formatPrefix.
func (h *Homes) names() ([]string, error) {
	entries, err := os.ReadDir(h.dir)
	if err != nil {
		return nil, fmt.Errorf("list VM directories: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && validUUID.MatchString(strings.TrimPrefix(e.Name(), formatPrefix)) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Open opens the home directory of a VM. The error wraps fs.ErrNotExist if the directory does not exist or its creation
// was interrupted.
func (h *Homes) Open(id string) (*Home, error) {
	if !validUUID.MatchString(id) {
		return nil, fmt.Errorf("open VM directory: %w", invalid("the id %q is not a UUID", id))
	}
	return h.open(id)
}

func (h *Homes) open(name string) (*Home, error) {
	home := &Home{homes: h, id: name, dir: filepath.Join(h.dir, name)}
	text, err := os.ReadFile(home.path("uid"))
	if err != nil {
		return nil, fmt.Errorf("open VM directory: %w", err)
	}
	if home.uid, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil || home.uid < 1000 {
		return nil, fmt.Errorf("open VM directory: %s does not contain a valid uid", home.path("uid"))
	}
	return home, nil
}

// Claim opens the home directory of a VM. If there is none, Claim creates one and assigns an unused uid to the VM.
func (h *Homes) Claim(id string) (*Home, error) {
	if !validUUID.MatchString(id) {
		return nil, fmt.Errorf("open VM directory: %w", invalid("the id %q is not a UUID", id))
	}
	return h.claim(id)
}

// claim does the same as Claim. The parameter id may also name the directory of a formatting process (see
// formatPrefix).
func (h *Homes) claim(id string) (*Home, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	home, err := h.open(id)
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
	if err := atomicfile.SyncDir(h.dir); err != nil {
		return nil, fmt.Errorf("make VM directory: %w", err)
	}
	if err := atomicfile.WriteFile(filepath.Join(dir, "uid"), []byte(strconv.Itoa(uid)+"\n"), 0o600); err != nil {
		return nil, fmt.Errorf("make VM directory: %w", err)
	}
	return &Home{homes: h, id: id, dir: dir, uid: uid}, nil
}

// freeUID returns an unused uid. The search begins at a uid derived from the VM's id, so that the uid of a removed VM
// is rarely reused soon.
func (h *Homes) freeUID(id string) (int, error) {
	used := map[int]bool{}
	names, err := h.names()
	if err != nil {
		return 0, err
	}
	for _, other := range names {
		home, err := h.open(other)
		if errors.Is(err, fs.ErrNotExist) {
			continue // An agent ended after it created the directory and before it wrote the uid.
		}
		if err != nil {
			return 0, err
		}
		used[home.uid] = true
		tpm, err := home.tpmUID()
		if err != nil {
			return 0, err
		}
		used[tpm] = true
	}
	if !mutant.On(mutant.ReuseLiveUID) {
		if err := runningUIDs(used); err != nil {
			return 0, err
		}
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

// runningUIDs adds the uids of all running processes to the set used.
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

// Home is the directory of one VM, with mode 0700 and owned by the agent. QEMU cannot see it, except sockets/.
//
//	uid          the VM's uid and gid
//	disks/       the VM's disks: package disk
//	seed.img     the VM's seed, if it has one
//	nvram.fd     the NVRAM of starts with UEFI and without secure boot
//	nvram-secure.fd  the NVRAM of starts with secure boot
//	tpm/         the VM's TPM, if it was started with one: see tpmDir
//	record.json  the last start: Record
//	asked        how the agent asked that process to end, if it did
//	exit.json    how that process ended: Exit
//	console.log  output of the guest's serial port
//	stderr.log   QEMU's standard error; stderr.log.old of the start before
//	*.sock       QEMU's listening sockets: work, inspect, console
//	migrating    exists while the guest must not run because of a migration
//	migration/   files of the tunnel of a migration: package tunnel
//	sockets/     the directory /sockets of QEMU, read-only for QEMU: see Home.Sockets
//
// A move of the VM to another host must copy disks/, nvram.fd, nvram-secure.fd and tpm/state/. They contain plain
// files, which change only while the VM has a process.
type Home struct {
	homes   *Homes
	id, dir string
	uid     int
}

// ID returns the VM's id.
func (h *Home) ID() string { return h.id }

// UID returns the VM's uid, which is also its gid.
func (h *Home) UID() int { return h.uid }

// Disks returns the directory of the VM's disks. Package disk creates it.
func (h *Home) Disks() string { return h.path("disks") }

// Seed returns the path of the VM's seed. The caller of Launch creates the file.
func (h *Home) Seed() string { return h.path("seed.img") }

// Migration returns the directory for the tunnel of a migration. Package tunnel creates the directory.
func (h *Home) Migration() string { return h.path("migration") }

// Sockets returns the directory for listening sockets to which QEMU connects by itself: the memory of a migration with
// several connections. QEMU sees the directory as socketsDir if Record.Sockets is true. QEMU cannot create files there.
func (h *Home) Sockets() string { return h.path("sockets") }

// Console returns the log of the guest's serial port. The log contains the output of all starts of the VM.
func (h *Home) Console() *console.Log { return console.At(h.path("console.log"), console.KeepConsole) }

// stderr returns the log of what QEMU wrote to its standard error since the last start.
func (h *Home) stderr() *console.Log { return console.At(h.path("stderr.log"), console.KeepStderr) }

// Names of QEMU's listening sockets in the VM's home directory.
const (
	workSocket    = "work.sock"
	inspectSocket = "inspect.sock"
	consoleSocket = "console.sock"
	agentSocket   = "agent.sock"
)

// Record describes the last start of a VM. It is written before the launcher process is forked. It is written again,
// with the pid and the start time of the process, before the launcher is sent its instructions.
type Record struct {
	Generation uint64   `json:"generation"` // of the assignment
	Owner      string   `json:"owner"`      // any text of the caller of Launch, at most 1 KiB
	Spec       Spec     `json:"spec"`       // with the slots that KeepSlots chose
	Argv       []string `json:"argv"`
	// HostNetwork means that the process runs in the network namespace of the agent (see Launcher.RBD).
	HostNetwork bool `json:"host_network,omitempty"`
	// Incoming means that the process was started to receive the state of a guest (see Launcher.LaunchIncoming).
	Incoming bool `json:"incoming,omitempty"`
	// Sockets means that QEMU sees the directory Home.Sockets. Agents of earlier versions have started QEMU without it.
	Sockets bool   `json:"sockets,omitempty"`
	BootID  string `json:"boot_id"` // of the host
	// The fields below are set after the process was forked.
	PID       int       `json:"pid"`
	StartTime uint64    `json:"start_time"` // clock ticks since the host's boot, as in /proc/PID/stat; detects a reused pid
	Started   time.Time `json:"started"`
	// TPM is the process of the VM's TPM. It is nil if Spec.TPM is false.
	TPM *TPMProcess `json:"tpm,omitempty"`
}

// Exit describes how a VM's process ended.
type Exit struct {
	Reason Reason `json:"reason"`
	Text   string `json:"text"` // for users; contains no path of the host
}

// Reason is the kind of an Exit.
type Reason string

const (
	Guest     Reason = "guest"   // the guest powered itself off
	Requested Reason = "asked"   // PressPowerButton, PowerOff or Kill was called
	Crashed   Reason = "crashed" // anything else, or QEMU could not be started
)

// Record reads the record of the last start. The error wraps [ErrNotStarted] if there is none.
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

// Exit reads how the last process ended. It returns false if no exit is recorded: the process runs, or it ended while
// no agent ran, and [Launcher.Adopt] has not recorded that yet.
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

// Remove removes the home directory and its content. The file uid is removed last, so that the uid stays in use until
// then. The uid of a TPM can be used again as soon as the TPM's files are removed. Remove returns nil if there is no
// home directory. The caller must ensure that the VM has no process.
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
	return atomicfile.SyncDir(filepath.Dir(h.dir))
}

func (h *Home) path(name string) string { return filepath.Join(h.dir, name) }

// begin prepares a new start. It removes what is left of the last start: its exit, the request to end it, and its
// sockets. It renames stderr.log and writes the record r.
func (h *Home) begin(r Record) error {
	if err := atomicfile.RemoveLeftovers(h.dir); err != nil {
		return err
	}
	for _, name := range []string{"exit.json", "asked", frozenName, migratingName, workSocket, inspectSocket, consoleSocket, agentSocket} {
		if err := os.Remove(h.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if r.Sockets {
		if err := h.makeSockets(); err != nil {
			return err
		}
	}
	if err := os.Rename(h.path("stderr.log"), h.path("stderr.log.old")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if r.Incoming {
		if err := h.setMigrating(""); err != nil {
			return err
		}
	}
	return h.write("record.json", r)
}

// makeSockets creates the directory Home.Sockets, and removes what is left in it.
func (h *Home) makeSockets() error {
	if err := os.RemoveAll(h.Sockets()); err != nil {
		return err
	}
	if err := os.Mkdir(h.Sockets(), 0o700); err != nil {
		return err
	}
	// The VM's user must find sockets by name. Other users of the host cannot enter the home.
	return os.Chmod(h.Sockets(), 0o711)
}

// Contents of the file asked, which stores how the agent requested the end of the process.
const (
	requestedNothing     = ""
	requestedPowerButton = "powerdown"
	requestedPowerOff    = "cut"
)

// setRequested stores in the file asked how the agent requests the end of the process. The file is not synced: if the
// host crashes, the process has ended as well.
func (h *Home) setRequested(what string) error {
	return os.WriteFile(h.path("asked"), []byte(what), 0o600)
}

// requested returns how the agent requested the end of the process, or requestedNothing.
func (h *Home) requested() string {
	what, err := os.ReadFile(h.path("asked"))
	if err != nil {
		return requestedNothing
	}
	return string(what)
}

func (h *Home) read(name string, into any) error {
	text, err := os.ReadFile(h.path(name))
	if err != nil {
		return err
	}
	// Unknown fields of a newer agent are ignored, so that after a downgrade the agent still finds its VMs.
	return json.Unmarshal(text, into)
}

func (h *Home) write(name string, from any) error {
	text, err := json.MarshalIndent(from, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.WriteFile(h.path(name), append(text, '\n'), 0o600)
}
