package main

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/prototext"

	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// stage holds a fake cloud and the environment of the user who runs the program.
type stage struct {
	cloud   *fakeCloud
	env     map[string]string
	home    string
	answers []string
	stdin   string
}

// The stories are in testdata. Commands:
//
//	cloud members=(a,b) [tls]  a new cloud and an empty home; TRIVET_ENDPOINT, TRIVET_TOKEN, TRIVET_INSECURE_PLAINTEXT are set
//	env                    KEY=VALUE lines change the environment
//	vm, image, node        add one, as prototext
//	fail                   method= code= [member=] [times=] [after]: make calls fail; the input is the message
//	stop member=           that member can be reached no more
//	looks                  the statuses an imported image goes through
//	watch                  what the next watch sends, a line each: prototext of an event, a status code, or WAIT
//	console                what the console log sends, a Go string a line; one that is followed then waits or, when
//	                       ReadConsoleLog is told to fail after, breaks
//	stdin                  what the next run of the program finds on standard input; a line EMPTY is empty
//	files                  the files in the home directory
//	alarm name=            raise an alarm of the key-value store
//	snapshot               the file that the key-value store gives as its snapshot: KEY=VALUE lines
//	later by=              the ledger's clock goes on
//	answer                 what the person at the terminal types, a line each
//	file name=             a file in the home directory
//	trivet [interrupt=]    run the program with these arguments, and interrupt it when it has printed that
//	calls                  what the cloud was asked since the last time
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

// certified returns the TLS credentials of members. It writes two certificate authorities to the home directory: ca, which
// signed the members' certificate, and other, which did not.
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
	case "file":
		return s.file(t, d)
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
	case "alarm":
		var name string
		d.ScanArgs(t, "name", &name)
		require.NoError(t, s.cloud.kv.setAlarm(name))
	case "snapshot":
		s.cloud.kv.file = snapshotOf(t, d.Input)
	case "trivet":
		var until string
		d.MaybeScanArgs(t, "interrupt", &until)
		return s.trivet(t, d.Input, until)
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

// secretWords maps the words that scripts write to the secrets that they replace.
var secretWords = strings.NewReplacer("NEWPASSWORD", newPassword, "PASSWORD", password, "TENANT", tenantToken, "ADMIN", adminToken,
	"ISSUED", issuedToken, "SASECRET", saSecret)

// file prints a file, or writes the input to it. Secrets are replaced by the words of secretWords in both directions.
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

// trivet runs the program and returns its output and exit status.
func (s *stage) trivet(t *testing.T, line, until string) string {
	var out, errs bytes.Buffer
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	stdout := io.Writer(&out)
	if until != "" {
		stdout = io.MultiWriter(&out, onWrite(func() {
			if strings.Contains(out.String(), until) {
				interrupt()
			}
		}))
	}
	sh := session.Shell{
		Args: words(strings.ReplaceAll(line, "$HOME", s.home)), Env: func(k string) string { return s.env[k] }, Stdin: strings.NewReader(s.stdin),
		Stdout: stdout, Stderr: &errs, Now: func() time.Time { return now }, Dialer: s.cloud.dial,
	}
	if len(s.answers) > 0 {
		sh.Ask = func(_ context.Context, question string, secret bool) (string, error) {
			answer := s.answers[0]
			s.answers = s.answers[1:]
			require.Equal(t, secret, strings.HasPrefix(question, "Password"))
			errs.WriteString(question + "\n")
			return answer, nil
		}
	}
	code := run(ctx, sh)
	s.stdin = ""
	for _, secret := range []string{tenantToken, adminToken, password, kvPassword, kvToken, newPassword, oidcToken} {
		require.NotContains(t, out.String()+errs.String(), secret)
	}
	for _, secret := range []string{issuedToken, saSecret} { // they are shown once, on standard output
		require.NotContains(t, errs.String(), secret)
	}
	text := strings.ReplaceAll(out.String(), s.home, "$HOME")
	if strings.ContainsAny(text, "\x1b\r") {
		text = strconv.Quote(text) + "\n"
	}
	if errs.Len() > 0 {
		text += "stderr:\n" + strings.ReplaceAll(errs.String(), s.home, "$HOME")
	}
	if code != 0 {
		text += fmt.Sprintf("exit %d\n", code)
	}
	return text
}

// onWrite is a writer that calls the function for each write.
type onWrite func()

func (f onWrite) Write(p []byte) (int, error) { f(); return len(p), nil }

// words splits a command line at spaces that are not between quotes.
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
