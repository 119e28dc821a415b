package restapi

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// forwardHeader marks a request that another member hands on. A member that is not the leader refuses it: there is never
// a second hop.
const forwardHeader = "X-Trivet-Forward"

const (
	// forwardSkew is by how much the clocks of two members may differ, and how long a forward that was overheard could be
	// said again if it were not remembered.
	forwardSkew = 15 * time.Second
	// forwardMemory bounds how many forwarded writes are remembered for that long.
	forwardMemory = 1 << 18
	// forwardAnswer bounds an answer that is not a list, in bytes: a value of 1.5 MiB is six times that in the worst JSON.
	forwardAnswer = 16 << 20
	// forwardDial is how long the leader may take to accept a connection, forwardPause to send the next piece of a list.
	forwardDial  = 2 * time.Second
	forwardPause = 30 * time.Second
)

// seal is the proof that a request comes from a member: a MAC over where it goes, when it was made, a number that was
// used once, method, path with query, the body's SHA-256, and the address of the client that asked the member.
type seal struct {
	key []byte
	now func() time.Time
}

// forwarded is a header that was checked, and what is left to check.
type forwarded struct {
	body    [sha256.Size]byte
	nonce   string
	address string // of the client
}

func (s seal) mac(to uint64, at, nonce, method, uri, body, address string) string {
	h := hmac.New(sha256.New, s.key)
	fmt.Fprintf(h, "v2\n%d\n%s\n%s\n%s\n%s\n%s\n%s", to, at, nonce, method, uri, body, address)
	return hex.EncodeToString(h.Sum(nil))
}

// put returns the header that authenticates a request forwarded to a member. address is the client's, and has no
// spaces.
func (s seal) put(to uint64, method, uri string, body []byte, address string) string {
	var nonce [16]byte
	rand.Read(nonce[:])
	sum := sha256.Sum256(body)
	at, n, b := strconv.FormatInt(s.now().UnixMilli(), 10), hex.EncodeToString(nonce[:]), hex.EncodeToString(sum[:])
	return strings.Join([]string{"v2", at, n, b, address, s.mac(to, at, n, method, uri, b, address)}, " ")
}

// check reads the header of a request to this member. The body has not been read yet: see forwarded.verify.
func (s seal) check(self uint64, header, method, uri string) (*forwarded, error) {
	refused := fault.New(fault.PermissionDenied, "%s: not made by a member of this cluster", forwardHeader)
	part := strings.Split(header, " ")
	if len(part) != 6 || part[0] != "v2" || len(part[1]) > 20 || len(part[2]) > 64 {
		return nil, refused
	}
	at, nonce, body, address, mac := part[1], part[2], part[3], part[4], part[5]
	if !hmac.Equal([]byte(mac), []byte(s.mac(self, at, nonce, method, uri, body, address))) {
		return nil, refused
	}
	ms, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, refused
	}
	if late := s.now().Sub(time.UnixMilli(ms)); late.Abs() > forwardSkew {
		return nil, fault.New(fault.PermissionDenied, "%s: made %v ago by its maker's clock: see that the members' clocks agree", forwardHeader,
			late.Round(time.Millisecond))
	}
	f := &forwarded{nonce: nonce, address: address}
	if n, err := hex.Decode(f.body[:], []byte(body)); err != nil || n != len(f.body) {
		return nil, refused
	}
	return f, nil
}

// verify checks the body. A nil forwarded is a request that no member handed on.
func (f *forwarded) verify(body []byte) error {
	if f != nil && sha256.Sum256(body) != f.body {
		return fault.New(fault.PermissionDenied, "%s: the body is another", forwardHeader)
	}
	return nil
}

// onceOnly remembers the forwarded writes of the last while, so that whoever overhears one cannot say it again.
type onceOnly struct {
	mu       sync.Mutex
	turned   time.Time
	new, old map[string]struct{}
}

// first reports whether a nonce was not seen before. When there are more than can be remembered, that is an error.
func (o *onceOnly) first(nonce string, now time.Time) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	// A forward is valid from one skew before its time to one after it.
	if now.Sub(o.turned) > 2*forwardSkew || o.new == nil {
		o.old, o.new, o.turned = o.new, map[string]struct{}{}, now
	}
	_, a := o.new[nonce]
	_, b := o.old[nonce]
	switch {
	case a || b:
		return fault.New(fault.PermissionDenied, "%s: was used before", forwardHeader)
	case len(o.new) >= forwardMemory:
		return fault.New(fault.Internal, "more than %d forwarded writes within %v", forwardMemory, 2*forwardSkew).MayRetry()
	}
	o.new[nonce] = struct{}{}
	return nil
}

// forwarder hands requests on to the leader.
type forwarder struct {
	seal         seal
	scheme, port string
	client       *http.Client
}

func newForwarder(s seal, port uint16, secure *tls.Config) *forwarder {
	scheme := "http"
	if secure != nil {
		scheme = "https"
	}
	return &forwarder{
		seal: s, scheme: scheme, port: strconv.Itoa(int(port)),
		client: &http.Client{
			// The environment's proxy is not for what members say to each other.
			Transport: &http.Transport{
				DialContext:         (&net.Dialer{Timeout: forwardDial, KeepAlive: 15 * time.Second}).DialContext,
				TLSClientConfig:     secure,
				TLSHandshakeTimeout: forwardDial,
				MaxIdleConnsPerHost: 64, MaxConnsPerHost: 512, IdleConnTimeout: time.Minute, DisableCompression: true,
				MaxResponseHeaderBytes: 64 << 10, WriteBufferSize: 32 << 10, ReadBufferSize: 32 << 10,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// leaderHost is the host of a peer address.
func leaderHost(peer string) (string, bool) {
	if !strings.Contains(peer, "://") {
		peer = "http://" + peer
	}
	u, err := url.Parse(peer)
	if err != nil || u.Hostname() == "" {
		return "", false
	}
	return u.Hostname(), true
}

// forward says a request to the leader and gives its answer, whatever it is. The leader's first word must come within
// limit; a list may then take as long as it goes on.
func (f *forwarder) forward(w *rest.Response, r *http.Request, to uint64, host string, body []byte, limit time.Duration, list bool) (any, error) {
	ctx, cancel := context.WithCancelCause(r.Context())
	watch := time.AfterFunc(limit, func() { cancel(errSilentLeader) })
	stop := func() { watch.Stop(); cancel(nil) }
	target := url.URL{Scheme: f.scheme, Host: net.JoinHostPort(host, f.port), Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
	req, err := http.NewRequestWithContext(ctx, r.Method, target.String(), bytes.NewReader(body))
	if err != nil {
		stop()
		return nil, proxyFailed(to, err)
	}
	req.Header.Set(forwardHeader, f.seal.put(to, r.Method, target.RequestURI(), body, rest.Remote(r)))
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := f.client.Do(req)
	if err != nil {
		err = errors.Join(context.Cause(ctx), err)
		stop()
		return nil, proxyFailed(to, err)
	}
	w.Status = resp.StatusCode
	if after := resp.Header.Get("Retry-After"); after != "" {
		w.Header().Set("Retry-After", after)
	}
	if list && resp.StatusCode == http.StatusOK || r.Method == http.MethodHead {
		return rest.Verbatim{Body: &tail{resp.Body, to, watch, stop}}, nil
	}
	defer stop()
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, forwardAnswer+1))
	if err != nil {
		return nil, proxyFailed(to, err)
	}
	var envelope struct{ Data, Error, Meta json.RawMessage }
	if len(answer) > forwardAnswer || json.Unmarshal(answer, &envelope) != nil || envelope.Meta == nil || (envelope.Data == nil) == (envelope.Error == nil) {
		return nil, proxyFailed(to, fmt.Errorf("its answer, status %d, cannot be decoded", resp.StatusCode))
	}
	return rest.Verbatim{Body: io.NopCloser(bytes.NewReader(answer))}, nil
}

var errSilentLeader = errors.New("it did not answer in time")

// proxyFailed is the failure of the way to the leader. What was asked for may have been done.
func proxyFailed(to uint64, err error) error {
	reason := "the way to it broke: what was asked for may have been done"
	var op *net.OpError
	var plain tls.RecordHeaderError
	switch {
	case errors.Is(err, errSilentLeader):
		reason = "it did not answer in time: what was asked for may have been done"
	case errors.As(err, &op) && op.Op == "dial":
		reason = "it cannot be reached"
	case errors.As(err, &plain), errors.Is(err, http.ErrSchemeMismatch):
		reason = "it does not speak TLS, as this member does: give all of them a certificate"
	}
	return fault.New(fault.BadGateway, "forward to member %d, the leader: %s", to, reason).MayRetry().Because(err)
}

// tail is the answer of a leader that is passed on as it comes.
type tail struct {
	body  io.ReadCloser
	to    uint64
	watch *time.Timer
	stop  func()
}

func (t *tail) Read(b []byte) (int, error) {
	t.watch.Reset(forwardPause)
	n, err := t.body.Read(b)
	t.watch.Stop() // what the client takes to read is not the leader's
	if err != nil && err != io.EOF {
		err = proxyFailed(t.to, err)
	}
	return n, err
}

func (t *tail) Close() error {
	t.stop()
	return t.body.Close()
}
