package main

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/prototext"

	"github.com/trivet-cloud/trivet/cli/session"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// stage is the state of one test script: a fake cloud, and the environment and input of the user who runs `trivet`.
type stage struct {
	cloud   *fakeCloud
	env     map[string]string
	home    string
	answers []string
	// edited is the text that the editor writes; empty for no editor.
	edited string
	stdin  string
}

// TestStories runs the scripts in testdata against a fake cloud, and checks that each command prints the output that
// the script contains. The text below a command is its input. Commands:
//
//	cloud members=(a,b) [tls]  creates a cloud with these members and an empty home directory, and sets
//	                       TRIVET_ENDPOINT, TRIVET_TOKEN and TRIVET_INSECURE_PLAINTEXT; with tls, the members use TLS
//	env                    sets environment variables: KEY=VALUE lines
//	vm, image, node        adds a VM, image or host to the cloud: prototext of the object
//	fail method= code= [member=] [times=] [after]  makes the next calls of a method fail with a status code, as often
//	                       as times= (default 1) and with the input as the message; with after, a call fails after it
//	                       has taken effect
//	stop member=           makes a member refuse connections
//	looks                  sets the statuses that the calls of GetImage return one after the other: a line each
//	watch                  sets what the next stream of WatchVm sends: lines of prototext of an event, a status code
//	                       that ends the stream, or WAIT; if the event has the ID of a VM, the next stream of that VM
//	watchlist              sets what the next stream of WatchVms or WatchAllVms sends: lines of prototext of a change, a
//	                       status code that ends the stream, or WAIT
//	details                sets what GetVmDetails returns besides the VM: prototext
//	console                adds output to the console log: a Go string literal a line; a stream that follows the log
//	                       then waits or, after "fail method=ReadConsoleLog after", breaks
//	stdin                  sets the standard input of the next `trivet`; the word EMPTY stands for an empty line, and the
//	                       word OPEN for an input that has no bytes and no end
//	files                  prints the names of the files in the home directory
//	alarm name=            raises an alarm of the key-value store
//	snapshot               sets the snapshot that the key-value store sends: KEY=VALUE lines
//	later by=              advances the ledger's clock by a duration
//	slowsnapshots          makes all snapshots that are created later PENDING until they are read
//	failsnapshots [name=]  makes all snapshots that are created later, or those of a name, ERROR with the reason in the input
//	hangsnapshots name=    makes snapshots of a name that are created later stay PENDING
//	answer                 adds answers that the user types at the terminal's prompts: a line each
//	edit                   sets the text that the editor saves in the next `trivet`
//	zeros name= size=      writes a file of that many zero bytes to the home directory
//	file name=             prints a file in the home directory or, with input, writes it
//	trivet [interrupt=] [sorted]  runs `trivet` with the input as its arguments and prints its output; interrupts it when
//	                       the output or the standard error contains the text of interrupt=; with sorted, the lines of
//	                       the output are sorted, for a command that prints them in no fixed order
//	calls                  prints the calls that the cloud has received since the last "calls"
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *stage
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "cloud" {
				s = newStage(t, d)
				return ""
			}
			return s.step(t, d)
		})
	})
}

func newStage(t *testing.T, d *datadriven.TestData) *stage {
	var members []string
	for _, a := range d.CmdArgs {
		members = append(members, a.Vals...)
	}
	s := &stage{home: t.TempDir()}
	secure := insecure.NewCredentials()
	if d.HasArg("tls") {
		secure = s.certified(t, members)
	}
	s.cloud = newCloud(t, secure, members...)
	s.env = map[string]string{"HOME": s.home, "TRIVET_ENDPOINT": strings.Join(members, ","), "TRIVET_TOKEN": tenantToken, "TRIVET_INSECURE_PLAINTEXT": "1"}
	return s
}

// certified returns TLS credentials for members. It writes the certificates of two authorities to the home directory:
// ca, which signed the members' certificate, and other, which did not.
func (s *stage) certified(t *testing.T, hosts []string) credentials.TransportCredentials {
	var all []*mtls.Authority
	for seed, name := range []string{"ca", "other"} {
		a, err := mtls.NewAuthority(name, bytes.Repeat([]byte{byte(seed)}, 32))
		require.NoError(t, err)
		text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw})
		require.NoError(t, os.WriteFile(filepath.Join(s.home, name), text, 0o600))
		all = append(all, a)
	}
	c, err := all[0].IssueTenants(hosts, time.Now(), time.Hour)
	require.NoError(t, err)
	return credentials.NewServerTLSFromCert(c)
}

func (s *stage) step(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "env":
		for line := range lines(d.Input) {
			k, v, _ := strings.Cut(line, "=")
			s.env[k] = strings.ReplaceAll(secretWords.Replace(v), "$HOME", s.home)
		}
	case "vm":
		vm := &vmv1.VirtualMachine{}
		require.NoError(t, prototext.Unmarshal([]byte(d.Input), vm))
		vm.Id, vm.CreatedAt = s.cloud.nextID(), now.Add(-90*time.Minute).UnixMilli()
		s.cloud.vms = append(s.cloud.vms, vm)
		return vm.Id + "\n"
	case "image":
		i := &vmv1.Image{}
		require.NoError(t, prototext.Unmarshal([]byte(d.Input), i))
		i.Id, i.CreatedAt = s.cloud.nextID(), now.Add(-72*time.Hour).UnixMilli()
		s.cloud.images = append(s.cloud.images, i)
		return i.Id + "\n"
	case "node":
		n := &vmv1.Node{}
		require.NoError(t, prototext.Unmarshal([]byte(d.Input), n))
		s.cloud.nodes = append(s.cloud.nodes, n)
	case "fail":
		f := &fault{message: d.Input, times: 1, after: d.HasArg("after")}
		var code string
		d.ScanArgs(t, "method", &f.method)
		d.ScanArgs(t, "code", &code)
		d.MaybeScanArgs(t, "member", &f.member)
		d.MaybeScanArgs(t, "times", &f.times)
		require.NoError(t, f.code.UnmarshalJSON([]byte(strconv.Quote(code))))
		s.cloud.faults = append(s.cloud.faults, f)
	case "stop":
		var member string
		d.ScanArgs(t, "member", &member)
		s.cloud.mu.Lock()
		delete(s.cloud.members, member+":50051")
		s.cloud.mu.Unlock()
	case "looks":
		for line := range lines(d.Input) {
			s.cloud.looks = append(s.cloud.looks, vmv1.ImageStatus(vmv1.ImageStatus_value["IMAGE_STATUS_"+line]))
		}
	case "watch":
		s.cloud.watches = append(s.cloud.watches, script(t, d.Input))
	case "watchlist":
		s.cloud.views.scripts = append(s.cloud.views.scripts, listScript(t, d.Input))
	case "details":
		s.cloud.views.details = &operatorv1.GetVmDetailsResponse{}
		require.NoError(t, prototext.Unmarshal([]byte(d.Input), s.cloud.views.details))
	case "console":
		for line := range lines(d.Input) {
			text, err := strconv.Unquote(line)
			require.NoError(t, err)
			s.cloud.console = append(s.cloud.console, []byte(text))
		}
	case "later":
		var by string
		d.ScanArgs(t, "by", &by)
		late, err := time.ParseDuration(by)
		require.NoError(t, err)
		s.cloud.credits.late += late
	case "answer":
		for line := range lines(d.Input) {
			s.answers = append(s.answers, secretWords.Replace(line))
		}
	case "edit":
		s.edited = d.Input
	case "file":
		return s.file(t, d)
	case "zeros":
		var name string
		var size int
		d.ScanArgs(t, "name", &name)
		d.ScanArgs(t, "size", &size)
		path := filepath.Join(s.home, name)
		require.NoError(t, os.WriteFile(path, make([]byte, size), 0o600))
		require.NoError(t, os.Chtimes(path, now, now))
	case "stdin":
		s.stdin = strings.NewReplacer("KVPASSWORD", kvPassword, "EMPTY", "", "ISSUED", issuedToken, "UNPROVEN", unprovenToken).Replace(d.Input) + "\n"
	case "files":
		entries, err := os.ReadDir(s.home)
		require.NoError(t, err)
		var names strings.Builder
		for _, e := range entries {
			names.WriteString(e.Name() + "\n")
		}
		return names.String()
	case "failsnapshots":
		s.cloud.mu.Lock()
		s.cloud.snapshots.failure, s.cloud.snapshots.failing = strings.TrimSpace(d.Input), ""
		d.MaybeScanArgs(t, "name", &s.cloud.snapshots.failing)
		s.cloud.mu.Unlock()
	case "hangsnapshots":
		s.cloud.mu.Lock()
		d.ScanArgs(t, "name", &s.cloud.snapshots.hanging)
		s.cloud.mu.Unlock()
	case "slowsnapshots":
		s.cloud.mu.Lock()
		s.cloud.snapshots.slow = true
		s.cloud.mu.Unlock()
	case "alarm":
		var name string
		d.ScanArgs(t, "name", &name)
		require.NoError(t, s.cloud.kv.setAlarm(name))
	case "snapshot":
		s.cloud.kv.file = snapshotOf(t, d.Input)
	case "trivet":
		var until string
		d.MaybeScanArgs(t, "interrupt", &until)
		out := s.trivet(t, d.Input, until)
		if d.HasArg("sorted") {
			out = strings.Join(slices.Sorted(strings.Lines(out)), "")
		}
		return out
	case "calls":
		s.cloud.mu.Lock()
		defer s.cloud.mu.Unlock()
		calls := append(s.cloud.calls, "")
		s.cloud.calls = nil
		return strings.Join(calls, "\n")
	default:
		d.Fatalf(t, "unknown command %s", d.Cmd)
	}
	return ""
}

func lines(text string) iter.Seq[string] { return strings.SplitSeq(strings.TrimSpace(text), "\n") }

func script(t *testing.T, text string) (all []watched) {
	for line := range lines(text) {
		var code codes.Code
		if line == "WAIT" {
			all = append(all, watched{wait: true})
			continue
		}
		if code.UnmarshalJSON([]byte(strconv.Quote(line))) == nil {
			all = append(all, watched{code: code})
			continue
		}
		e := &vmv1.VmEvent{}
		require.NoError(t, prototext.Unmarshal([]byte(line), e))
		e.Timestamp = now.UnixMilli()
		all = append(all, watched{event: e})
	}
	return all
}

// secretWords replaces words in scripts, such as PASSWORD, by the secrets that they stand for.
var secretWords = strings.NewReplacer("NEWPASSWORD", newPassword, "PASSWORD", password, "TENANT", tenantToken, "ORGBOSS", orgAdminToken, "ADMIN", adminToken,
	"ISSUED", issuedToken, "SASECRET", saSecret)

// file writes the input to a file in the home directory, with the words of secretWords replaced by secrets. Without
// input, it returns the file's mode and content, with secrets replaced by words.
func (s *stage) file(t *testing.T, d *datadriven.TestData) string {
	var name string
	d.ScanArgs(t, "name", &name)
	path := filepath.Join(s.home, name)
	if d.Input != "" {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(secretWords.Replace(d.Input)), 0o600))
		return ""
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	info, err := os.Stat(path)
	require.NoError(t, err)
	return fmt.Sprintf("%v\n%s", info.Mode(), strings.NewReplacer(tenantToken, "TENANT", issuedToken, "ISSUED", saSecret, "SASECRET").Replace(string(text)))
}

// trivet runs the program with the command line and returns its output, standard error and exit code. If the parameter
// until is not empty, trivet interrupts the program when the output or the standard error contains that text. It fails
// the test if the output contains a secret.
func (s *stage) trivet(t *testing.T, line, until string) string {
	var out, errs bytes.Buffer
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var writing sync.Mutex // The program writes to both from several goroutines.
	write := func(to *bytes.Buffer) io.Writer {
		return writerFunc(func(p []byte) (int, error) {
			writing.Lock()
			defer writing.Unlock()
			to.Write(p)
			if until != "" && (strings.Contains(out.String(), until) || strings.Contains(errs.String(), until)) {
				interrupt()
			}
			return len(p), nil
		})
	}
	stdout, stderr := write(&out), write(&errs)
	in := io.Reader(strings.NewReader(s.stdin))
	if s.stdin == "OPEN\n" {
		pipe, end := io.Pipe()
		defer end.Close()
		in = pipe
	}
	sh := session.Shell{
		Args: words(strings.ReplaceAll(line, "$HOME", s.home)), Env: func(k string) string { return s.env[k] }, Stdin: in,
		Stdout: stdout, Stderr: stderr, Now: func() time.Time { return now }, Dialer: s.cloud.dial,
		HTTP: &http.Client{Transport: fakePublisher{}},
	}
	if len(s.answers) > 0 {
		sh.Ask = func(_ context.Context, question string, secret bool) (string, error) {
			answer := s.answers[0]
			s.answers = s.answers[1:]
			require.Equal(t, secret, strings.HasPrefix(question, "Password"))
			_, _ = io.WriteString(stderr, question+"\n")
			return answer, nil
		}
	}
	editedFile := "no file was edited"
	if edited := s.edited; edited != "" {
		sh.Edit = func(_ context.Context, path string) error {
			editedFile = path
			t.Cleanup(func() { _ = os.Remove(path) }) // the command keeps the file if the text is invalid
			text, err := os.ReadFile(path)
			_, _ = stdout.Write(text)
			return errors.Join(err, os.WriteFile(path, []byte(edited), 0o600))
		}
		s.edited = ""
	}
	code := run(ctx, sh)
	s.stdin = ""
	for _, secret := range []string{tenantToken, adminToken, password, kvPassword, kvToken, newPassword, oidcToken} {
		require.NotContains(t, out.String()+errs.String(), secret)
	}
	for _, secret := range []string{issuedToken, saSecret} { // these may be printed, but only to standard output
		require.NotContains(t, errs.String(), secret)
	}
	// The version of Go and the platform depend on the machine.
	build := strings.NewReplacer(s.home, "$HOME", runtime.Version(), "GOVERSION", runtime.GOOS+"/"+runtime.GOARCH, "PLATFORM")
	text := build.Replace(out.String())
	if strings.ContainsAny(text, "\x1b\r") {
		text = strconv.Quote(text) + "\n"
	}
	if errs.Len() > 0 {
		text += "stderr:\n" + strings.NewReplacer(s.home, "$HOME", editedFile, "$EDITED").Replace(errs.String())
	}
	if code != 0 {
		text += fmt.Sprintf("exit %d\n", code)
	}
	return text
}

// writerFunc is a function that implements io.Writer.
type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// words splits a command line into arguments at spaces that are not between quotes, and removes the quotes.
func words(line string) (all []string) {
	var word strings.Builder
	quote := rune(0)
	some := false
	for _, r := range line + " " {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '\'' || r == '"':
			quote, some = r, true
		case r == ' ':
			if word.Len() > 0 || some {
				all = append(all, word.String())
			}
			word.Reset()
			some = false
		default:
			word.WriteRune(r)
		}
	}
	return all
}

// TestHelpListsEachCommandInOneGroup checks that each command of the first level is under a heading of `trivet --help`.
func TestHelpListsEachCommandInOneGroup(t *testing.T) {
	_, root := commands(session.Shell{Env: func(string) string { return "" }})
	require.True(t, root.AllChildCommandsHaveGroup())
	help := root.UsageString()
	for _, c := range root.Commands() {
		require.Equal(t, !c.Hidden, strings.Contains(help, "\n  "+c.Name()+" "), c.Name())
	}
	vm, _, err := root.Find([]string{"vm", "list"})
	require.NoError(t, err)
	require.NotContains(t, vm.UsageString(), "--endpoint")
	require.Contains(t, root.UsageString(), "--endpoint")
}
