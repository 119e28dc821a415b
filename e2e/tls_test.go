package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// The ports for tenants' calls: REST APIs and gRPC.
var (
	restPorts = []int{8081, 8083, 8084, 8086, 8087}
	rpcPorts  = []int{50051, 50057, 9090}
)

// secured makes the members use TLS on the ports for tenants, from their next start on, and makes w's clients use TLS.
// It can be an argument of newWorld.
func secured(w *world) {
	require.NoError(w.t, os.Mkdir(w.dir.Path("tls"), 0o755))
	w.renew()
	w.own(w.dir.Path("tls"))
	w.trio.Extra = append(w.trio.Extra, "--tls-cert", "tls/tls.crt", "--tls-key", "tls/tls.key")
	w.speakTLS()
}

// speakTLS makes the clients that w creates from now on use TLS and trust the authority of the members' certificate.
func (w *world) speakTLS() {
	w.trio.TLS = w.authority()
	w.https = lab.HTTPS(w.trio.TLS)
	w.t.Cleanup(w.https.CloseIdleConnections)
}

// authority returns a configuration of clients that trust the authority of the members' certificate.
func (w *world) authority() *tls.Config {
	roots := x509.NewCertPool()
	text, err := os.ReadFile(w.caFile())
	require.NoError(w.t, err)
	require.True(w.t, roots.AppendCertsFromPEM(text))
	return &tls.Config{RootCAs: roots}
}

func (w *world) caFile() string { return w.dir.Path("tls", "tls-ca.crt") }

// renew writes a new certificate and key for the members' ports for tenants, in place of the old ones.
func (w *world) renew() {
	out, err := w.controlplane("tenant-cert", "--cluster-key", "cluster.key", "--hosts", "localhost,127.0.0.1,127.0.0.2,127.0.0.3,"+beyond, "--dir", "tls")
	require.NoError(w.t, err, out)
}

// serials returns the serial numbers of the certificates that the members present at all ports for tenants.
func (w *world) serials(ctx context.Context) (map[string]bool, error) {
	all := map[string]bool{}
	for _, host := range w.trio.Members {
		for _, port := range append(restPorts, rpcPorts...) {
			config := w.trio.TLS.Clone()
			config.NextProtos = []string{"h2", "http/1.1"}
			conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", fmt.Sprintf("%s:%d", host, port))
			if err != nil {
				return nil, fmt.Errorf("%s:%d: %w", host, port, err)
			}
			all[conn.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.Text(16)] = true
			conn.Close()
		}
	}
	return all, nil
}

// shows waits until all members present the certificate in tls/tls.crt at all ports for tenants.
func (w *world) shows(ctx context.Context) {
	pair, err := tls.LoadX509KeyPair(w.dir.Path("tls", "tls.crt"), w.dir.Path("tls", "tls.key"))
	require.NoError(w.t, err)
	require.NoError(w.t, lab.Until(ctx, "all ports show the new certificate", func(ctx context.Context) error {
		got, err := w.serials(ctx)
		if err == nil && (len(got) != 1 || !got[pair.Leaf.SerialNumber.Text(16)]) {
			err = fmt.Errorf("the certificates are %v", got)
		}
		return err
	}))
}

// TestTenantPortsUseTLS checks that each port for tenants accepts only TLS, and that REST, gRPC, etcd's clients and the
// program trivet can use it if they trust the authority. It also checks that a member does not start with plaintext on
// an address outside of loopback, or with a key that others can read.
func TestTenantPortsUseTLS(t *testing.T) {
	w := newWorld(t, secured)
	ctx := w.context(3 * time.Minute)
	for member, host := range w.trio.Members {
		for _, port := range restPorts {
			a, err := w.rest(member, "").Do(ctx, port, http.MethodGet, "/health", nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, a.Status)
			_, err = (&lab.REST{Host: host}).Do(ctx, port, http.MethodGet, "/health", nil)
			require.ErrorContains(t, err, "an HTTP request to an HTTPS server", "port %d", port)
			_, err = (&lab.REST{Host: host, Secure: true}).Do(ctx, port, http.MethodGet, "/health", nil)
			var stranger x509.UnknownAuthorityError
			require.ErrorAs(t, err, &stranger)
		}
		for _, port := range rpcPorts {
			check := func(secure credentials.TransportCredentials) error {
				conn, err := grpc.NewClient(fmt.Sprintf("passthrough:///%s:%d", host, port), grpc.WithTransportCredentials(secure))
				require.NoError(t, err)
				defer conn.Close()
				h, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
				if err != nil {
					return err
				}
				require.Equal(t, healthv1.HealthCheckResponse_SERVING, h.GetStatus())
				s, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
				require.NoError(t, err)
				require.NoError(t, s.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}))
				list, err := s.Recv()
				require.NoError(t, err)
				service := "credit.v1.CreditService"
				if port == 9090 {
					service = "network.v1.NetworkService"
				}
				require.Contains(t, list.String(), service)
				return nil
			}
			require.NoError(t, check(credentials.NewTLS(w.trio.TLS)))
			require.Equal(t, codes.Unavailable, status.Code(check(insecure.NewCredentials())), "plaintext at %d", port)
			require.Equal(t, codes.Unavailable, status.Code(check(credentials.NewTLS(&tls.Config{}))), "without the authority at %d", port)
		}
	}
	resp, err := w.https.Get("https://127.0.0.1:8084/metrics")
	require.NoError(t, err)
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Contains(t, string(text), "trivet_tls_certificate_expiry_timestamp_seconds")

	w.keysOverTLS(ctx)
	w.commandsOverTLS(ctx)

	// A member must not start on an address outside of loopback without TLS, nor with a key file that others can read.
	out, err := w.controlplane("--listen", beyond, "--data-dir", "never")
	require.Error(t, err)
	require.Contains(t, out, "--insecure-plaintext")
	require.NoDirExists(t, w.dir.Path("never"))
	require.NoError(t, os.Chmod(w.dir.Path("tls", "tls.key"), 0o644))
	out, err = w.controlplane("--listen", "127.0.0.9", "--data-dir", "lax", "--tls-cert", "tls/tls.crt", "--tls-key", "tls/tls.key")
	require.Error(t, err)
	require.Contains(t, out, "chmod 600")
}

// keysOverTLS checks that members forward requests to the leader over TLS and serve etcd's clients.
func (w *world) keysOverTLS(ctx context.Context) {
	t := w.t
	leader := w.kvLeader(ctx, 1, 2, 3)
	follower, third := leader%3+1, (leader+1)%3+1
	w.keys(ctx, follower, 200, http.MethodPut, "/api/v1/kv/a", map[string]string{"value": "1"})
	require.Equal(t, "1", w.keys(ctx, third, 200, http.MethodGet, "/api/v1/kv/a", nil)["value"])
	require.NotNil(t, w.keys(ctx, third, 200, http.MethodGet, "/api/v1/kv?prefix=a", nil)["items"])

	endpoint := "https://" + w.trio.Members[follower] + ":50051"
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, TLS: w.trio.TLS, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	require.NoError(t, err)
	defer client.Close()
	got, err := client.Get(ctx, "a")
	require.NoError(t, err)
	require.Equal(t, "1", string(got.Kvs[0].Value))
	members, err := client.MemberList(ctx)
	require.NoError(t, err)
	for _, m := range members.Members {
		require.True(t, strings.HasPrefix(m.ClientURLs[0], "https://"), m.ClientURLs)
	}

	// Build etcdctl. The script does nothing if .build/etcd is up to date.
	out, err := exec.Command("../controlplane/kv/compat/build").CombinedOutput()
	require.NoError(t, err, "%s", out)
	etcdctl, err := filepath.Abs("../.build/etcd/etcdctl")
	require.NoError(t, err)
	for _, args := range [][]string{{"put", "b", "2"}, {"get", "b"}, {"endpoint", "health", "--cluster"}} {
		out, err := exec.CommandContext(ctx, etcdctl, append([]string{"--endpoints", endpoint, "--cacert", w.caFile()}, args...)...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
}

// commandsOverTLS checks that the program trivet can log in over TLS with --tls-ca, that later commands use TLS without
// that flag, and that it sends neither a password nor a token in plaintext to another host.
func (w *world) commandsOverTLS(ctx context.Context) {
	t := w.t
	w.tenant("ada", "default", "default", "project:member")
	home := t.TempDir()
	password := filepath.Join(home, "password")
	require.NoError(t, os.WriteFile(password, []byte("correct horse\n"), 0o600))
	login := []string{"login", "--user", "ada", "--password-file", password, "--endpoint", "127.0.0.1,127.0.0.2"}
	_, errs, code := w.trivet(ctx, home, login...)
	require.Equal(t, 6, code)
	require.Contains(t, errs, "--tls-ca")
	_, errs, code = w.trivet(ctx, home, append(login, "--tls-ca", w.caFile())...)
	require.Zero(t, code, errs)
	_, errs, code = w.trivet(ctx, home, "vm", "list")
	require.Zero(t, code, errs)
	token := filepath.Join(home, "token")
	require.NoError(t, os.WriteFile(token, []byte(w.adminToken), 0o600))
	_, errs, code = w.trivet(ctx, home, "--token-file", token, "--endpoint", beyond, "vm", "list")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "the token would be sent to "+beyond+":50051 in plaintext")
}

// TestTLSIsTurnedOn turns on TLS member by member. It checks that meanwhile a member with TLS does not forward requests
// to a leader without TLS and gives the reason, and that in the end all members serve and have https URLs.
func TestTLSIsTurnedOn(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(2 * time.Minute)
	leader := w.kvLeader(ctx, 1, 2, 3)
	follower := leader%3 + 1
	w.keys(ctx, leader, 200, http.MethodPut, "/api/v1/kv/a", map[string]string{"value": "1"})
	secured(w)
	restart := func(id int) {
		require.NoError(t, w.dir.Stop(w.trio.Name(id), 12*time.Second))
		require.NoError(t, w.trio.Start(id))
	}
	restart(follower)
	require.NoError(t, lab.Until(ctx, "the member returns the reason", func(ctx context.Context) error {
		a, err := w.rest(follower, "").Do(ctx, kvPort, http.MethodPut, "/api/v1/kv/a", map[string]string{"value": "2"})
		if err == nil && !strings.Contains(a.Error.Message, "it does not use TLS") {
			err = errors.New(a.Raw)
		}
		return err
	}))
	restart(leader)
	restart((leader+1)%3 + 1)
	w.ready()
	w.kvLeader(ctx, 1, 2, 3)
	require.Equal(t, "1", w.keys(ctx, follower, 200, http.MethodGet, "/api/v1/kv/a", nil)["value"])
	etcd, err := clientv3.New(clientv3.Config{Endpoints: []string{"https://127.0.0.1:50051"}, TLS: w.trio.TLS, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	require.NoError(t, err)
	defer etcd.Close()
	require.NoError(t, lab.Until(ctx, "all members' URLs are https", func(ctx context.Context) error {
		list, err := etcd.MemberList(ctx)
		if err != nil {
			return err
		}
		for _, m := range list.Members {
			if want := "https://" + w.trio.Members[int(m.ID)] + ":50051"; len(m.ClientURLs) != 1 || m.ClientURLs[0] != want {
				return fmt.Errorf("member %d: %v", m.ID, m.ClientURLs)
			}
		}
		return nil
	}))
}

// TestCertificateIsReplacedUnderRequests replaces the members' certificate several times, once by an invalid one, while
// clients send REST and gRPC requests. It checks that no request fails, on new and on existing connections, and that
// the members present each valid certificate.
func TestCertificateIsReplacedUnderRequests(t *testing.T) {
	w := newWorld(t, secured)
	ctx := w.context(3 * time.Minute)
	token := w.tenant("ada", "default", "default", "project:member")

	requests, stop := context.WithCancel(ctx)
	var work sync.WaitGroup
	var done atomic.Int64
	failures := make(chan error, 16)
	repeat := func(what string, request func(ctx context.Context) error) {
		work.Go(func() {
			for requests.Err() == nil {
				if err := request(requests); err != nil && requests.Err() == nil {
					failures <- fmt.Errorf("%s: %w", what, err)
					return
				}
				done.Add(1)
			}
		})
	}
	once := lab.HTTPS(w.trio.TLS)
	once.Transport.(*http.Transport).DisableKeepAlives = true
	for name, client := range map[string]*http.Client{"new connections": once, "one connection": w.https} {
		for member, host := range w.trio.Members {
			rest := &lab.REST{Host: host, Token: token, HTTP: client, Secure: true}
			repeat(fmt.Sprint("REST at ", member, ", ", name), func(ctx context.Context) error {
				return rest.Call(ctx, http.MethodGet, "/api/v1/vms", nil, nil)
			})
		}
	}
	list := func(ctx context.Context, g *lab.GRPC) error {
		_, err := g.VMs.ListVms(ctx, &vmv1.ListVmsRequest{})
		return err
	}
	repeat("gRPC, new connections", func(ctx context.Context) error {
		g, err := lab.DialTLS("127.0.0.2", token, w.trio.TLS)
		if err != nil {
			return err
		}
		defer g.Close()
		return list(ctx, g)
	})
	standing := w.dial(3, token)
	repeat("gRPC, one connection", func(ctx context.Context) error { return list(ctx, standing) })
	watch, err := healthv1.NewHealthClient(standing.Conn()).Watch(requests, &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	work.Go(func() {
		for requests.Err() == nil {
			if _, err := watch.Recv(); err != nil && requests.Err() == nil {
				failures <- fmt.Errorf("watch: %w", err)
				return
			}
		}
	})

	hurry := func() {
		for id := range w.trio.Members {
			w.dir.Signal(w.trio.Name(id), syscall.SIGHUP)
		}
	}
	logged := func(text string) {
		require.NoError(t, lab.Until(ctx, text+" is in every log", func(context.Context) error {
			for id := range w.trio.Members {
				if log, err := os.ReadFile(w.dir.LogFile(w.trio.Name(id))); err != nil || !bytes.Contains(log, []byte(text)) {
					return errors.Join(err, fmt.Errorf("the log of member %d does not contain it", id))
				}
			}
			return nil
		}))
	}
	for range 5 {
		w.renew()
		hurry()
		w.shows(ctx)
	}
	w.renew() // without SIGHUP: the members must notice the new file by themselves
	w.shows(ctx)
	before, err := w.serials(ctx)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(w.dir.Path("tls", "tls.key"), []byte("half a ke"), 0o600))
	hurry()
	logged("any PEM data in key input")
	after, err := w.serials(ctx)
	require.NoError(t, err)
	require.Equal(t, before, after)
	w.renew()
	hurry()
	w.shows(ctx)

	stop()
	work.Wait()
	close(failures)
	for err := range failures {
		require.NoError(t, err)
	}
	t.Logf("%d requests, none failed, under 7 certificates", done.Load())
	require.Positive(t, done.Load())
}
