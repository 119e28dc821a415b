package e2e

import (
	"bytes"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

// TestNoSecretOnTheWire records all packets while a tenant logs in and makes calls and one member forwards a request to
// another. It checks that the packets contain no secret if the members use TLS. Without TLS they must contain all
// secrets, which shows that the test would find them.
func TestNoSecretOnTheWire(t *testing.T) {
	const password, value = "a password on the wire 7d1f", "a value on the wire 93ab"
	for name, prepare := range map[string][]func(*world){"plaintext": nil, "TLS": {secured}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, prepare...)
			ctx := w.context(2 * time.Minute)
			leader := w.kvLeader(ctx, 1, 2, 3)
			tape := record(t)
			binding := &identityv1.Binding{Role: "project:member", OrgId: "default", ProjectId: "default"}
			require.NoError(t, w.admin.EnsureUser(ctx, "eve", password, binding))
			token, err := w.rest(1, "").IssueToken(ctx, "eve", password, nil)
			require.NoError(t, err)
			_, err = w.rest(2, token).Do(ctx, 8084, http.MethodGet, "/api/v1/vms", nil)
			require.NoError(t, err)
			w.keys(ctx, leader%3+1, 200, http.MethodPut, "/api/v1/kv/secret", map[string]string{"value": value})

			home := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(home, "password"), []byte(password), 0o600))
			args := []string{"login", "--user", "eve", "--password-file", filepath.Join(home, "password"), "--endpoint", "127.0.0.2"}
			if w.trio.TLS != nil {
				args = append(args, "--tls-ca", w.caFile())
			}
			_, errs, code := w.trivet(ctx, home, args...)
			require.Zero(t, code, errs)

			wire := tape.stop()
			t.Logf("%d bytes were recorded", len(wire))
			for what, secret := range map[string]string{"password": password, "token": token[len(token)-40:], "value": value, "envelope": `"request_id"`} {
				require.Equal(t, w.trio.TLS == nil, bytes.Contains(wire, []byte(secret)), what)
			}
		})
	}
}

// tape records the bytes of all packets, including headers, in this network namespace.
type tape struct {
	t    *testing.T
	fd   int
	end  string
	once sync.Once
	done chan []byte
}

func record(t *testing.T) *tape {
	all := uint16(syscall.ETH_P_ALL<<8 | syscall.ETH_P_ALL>>8)
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, int(all))
	require.NoError(t, err)
	require.NoError(t, syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_RCVBUFFORCE, 256<<20))
	p := &tape{t: t, fd: fd, end: "the tape ends " + t.Name(), done: make(chan []byte, 1)}
	go func() {
		var wire []byte
		packet := make([]byte, 1<<17)
		for {
			n, err := syscall.Read(fd, packet)
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			if err != nil || bytes.Contains(packet[:n], []byte(p.end)) {
				p.done <- wire
				return
			}
			wire = append(wire, packet[:n]...)
		}
	}()
	t.Cleanup(func() { p.stop() })
	return p
}

// stop ends the recording and returns the recorded bytes. Later calls return nil.
func (p *tape) stop() (wire []byte) {
	p.once.Do(func() { wire = p.cut() })
	return wire
}

func (p *tape) cut() []byte {
	conn, err := net.Dial("udp", "127.0.0.1:9")
	require.NoError(p.t, err)
	_, err = conn.Write([]byte(p.end))
	require.NoError(p.t, err)
	require.NoError(p.t, conn.Close())
	wire := <-p.done
	require.NoError(p.t, syscall.Close(p.fd))
	return wire
}
