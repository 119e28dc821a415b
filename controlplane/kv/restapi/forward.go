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
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// forwardHeader is the header of a request that one member forwards to another. It proves that the request comes from a
// member. A member that is not the leader refuses such a request, so a request is forwarded at most once.
const forwardHeader = "X-Trivet-Forward"

const (
	// forwardSkew is the maximum difference between the clocks of two members. A header is valid for this time before
	// and after its creation.
	forwardSkew = 15 * time.Second
	// maxNonces is the maximum number of forwarded writes within 2*forwardSkew. Their nonces are stored to refuse
	// replays.
	maxNonces = 1 << 18
	// maxForwardResponse is the maximum size in bytes of a response that is not a list. JSON can take six times the
	// size of a value, and a value has at most 1.5 MiB.
	maxForwardResponse = 16 << 20
	// dialTimeout is the maximum time to connect to the leader. listPieceTimeout is the maximum time to wait for the
	// next piece of a list.
	dialTimeout      = 2 * time.Second
	listPieceTimeout = 30 * time.Second
)

// forwardMAC authenticates requests between members with a MAC over the target member, the time, a nonce, the method,
// the path with query, the SHA-256 of the body, and the address of the client.
type forwardMAC struct {
	key []byte
	now func() time.Time
}

// forwardedRequest holds the content of a verified forwardHeader. The body's hash in it is compared with the body
// later, by verifyBody.
type forwardedRequest struct {
	body    [sha256.Size]byte
	nonce   string
	address string // address of the client
}

func (s forwardMAC) mac(to uint64, at, nonce, method, uri, body, address string) string {
	h := hmac.New(sha256.New, s.key)
	fmt.Fprintf(h, "v2\n%d\n%s\n%s\n%s\n%s\n%s\n%s", to, at, nonce, method, uri, body, address)
	return hex.EncodeToString(h.Sum(nil))
}

// header returns the value of forwardHeader for a request to another member. The parameter to is the ID of that member.
// The parameter address is the client's address, which must not contain spaces.
func (s forwardMAC) header(to uint64, method, uri string, body []byte, address string) string {
	var nonce [16]byte
	rand.Read(nonce[:])
	sum := sha256.Sum256(body)
	at, n, b := strconv.FormatInt(s.now().UnixMilli(), 10), hex.EncodeToString(nonce[:]), hex.EncodeToString(sum[:])
	return strings.Join([]string{"v2", at, n, b, address, s.mac(to, at, n, method, uri, b, address)}, " ")
}

// verify checks the MAC and the time in the forwardHeader of a request to this member. The caller checks the body
// later, with forwardedRequest.verifyBody.
func (s forwardMAC) verify(self uint64, header, method, uri string) (*forwardedRequest, error) {
	refused := fault.New(fault.PermissionDenied, "%s: not authenticated by a member of this cluster", forwardHeader)
	part := strings.Split(header, " ")
	if len(part) != 6 || part[0] != "v2" || len(part[1]) > 20 || len(part[2]) > 64 {
		return nil, refused
	}
	at, nonce, body, address, mac := part[1], part[2], part[3], part[4], part[5]
	if !hmac.Equal([]byte(mac), []byte(s.mac(self, at, nonce, method, uri, body, address))) && !mutant.On(mutant.AcceptAnyForward) {
		return nil, refused
	}
	ms, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, refused
	}
	if late := s.now().Sub(time.UnixMilli(ms)); late.Abs() > forwardSkew {
		return nil, fault.New(fault.PermissionDenied, "%s: its time is %v before this member's: synchronize the members' clocks", forwardHeader,
			late.Round(time.Millisecond))
	}
	f := &forwardedRequest{nonce: nonce, address: address}
	if n, err := hex.Decode(f.body[:], []byte(body)); err != nil || n != len(f.body) {
		return nil, refused
	}
	return f, nil
}

// verifyBody returns an error if the hash of the body differs from the hash in the verified header. If the request was
// not forwarded, f is nil, and verifyBody returns nil.
func (f *forwardedRequest) verifyBody(body []byte) error {
	if f != nil && sha256.Sum256(body) != f.body {
		return fault.New(fault.PermissionDenied, "%s: the body does not match the authenticated hash", forwardHeader)
	}
	return nil
}

// nonceCache stores the nonces of recent forwarded writes, to refuse replays.
type nonceCache struct {
	mu                sync.Mutex
	rotated           time.Time
	current, previous map[string]struct{}
}

// add stores a nonce. It returns an error if the nonce was used before, or if maxNonces nonces were stored since the
// last rotation.
func (o *nonceCache) add(nonce string, now time.Time) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	// A header is valid from forwardSkew before its time to forwardSkew after it. A nonce is therefore stored for at
	// least 2*forwardSkew: first in the set current, and after a rotation in the set previous.
	if now.Sub(o.rotated) > 2*forwardSkew || o.current == nil {
		o.previous, o.current, o.rotated = o.current, map[string]struct{}{}, now
	}
	_, a := o.current[nonce]
	_, b := o.previous[nonce]
	switch {
	case (a || b) && !mutant.On(mutant.ReplayForward):
		return fault.New(fault.PermissionDenied, "%s: the nonce was used before", forwardHeader)
	case len(o.current) >= maxNonces:
		return fault.New(fault.Internal, "more than %d forwarded writes within %v", maxNonces, 2*forwardSkew).MayRetry()
	}
	o.current[nonce] = struct{}{}
	return nil
}

// forwarder sends requests of clients to the leader and returns its responses.
type forwarder struct {
	mac          forwardMAC
	scheme, port string
	client       *http.Client
}

func newForwarder(s forwardMAC, port uint16, secure *tls.Config) *forwarder {
	scheme := "http"
	if secure != nil {
		scheme = "https"
	}
	return &forwarder{
		mac: s, scheme: scheme, port: strconv.Itoa(int(port)),
		client: &http.Client{
			// Proxy is not set: the HTTP proxy of the environment must not see traffic between members.
			Transport: &http.Transport{
				DialContext:         (&net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}).DialContext,
				TLSClientConfig:     secure,
				TLSHandshakeTimeout: dialTimeout,
				MaxIdleConnsPerHost: 64, MaxConnsPerHost: 512, IdleConnTimeout: time.Minute, DisableCompression: true,
				MaxResponseHeaderBytes: 64 << 10, WriteBufferSize: 32 << 10, ReadBufferSize: 32 << 10,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
}

// leaderHost returns the host of a raft address, which may have a scheme. It returns false if there is none.
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

// forward sends a request to the leader and returns the leader's response, which may be an error. The whole response
// must arrive within limit. If list is set, only the start of the response must arrive within limit; each wait for a
// further piece is limited to listPieceTimeout.
func (f *forwarder) forward(w *rest.Response, r *http.Request, to uint64, host string, body []byte, limit time.Duration, list bool) (any, error) {
	ctx, cancel := context.WithCancelCause(r.Context())
	timer := time.AfterFunc(limit, func() { cancel(errLeaderTimeout) })
	stop := func() { timer.Stop(); cancel(nil) }
	target := url.URL{Scheme: f.scheme, Host: net.JoinHostPort(host, f.port), Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
	req, err := http.NewRequestWithContext(ctx, r.Method, target.String(), bytes.NewReader(body))
	if err != nil {
		stop()
		return nil, forwardFault(to, err)
	}
	req.Header.Set(forwardHeader, f.mac.header(to, r.Method, target.RequestURI(), body, rest.Remote(r)))
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := f.client.Do(req)
	if err != nil {
		err = errors.Join(context.Cause(ctx), err)
		stop()
		return nil, forwardFault(to, err)
	}
	w.Status = resp.StatusCode
	if retryAfter := resp.Header.Get("Retry-After"); retryAfter != "" {
		w.Header().Set("Retry-After", retryAfter)
	}
	if list && resp.StatusCode == http.StatusOK || r.Method == http.MethodHead {
		return rest.Verbatim{Body: &forwardedBody{resp.Body, to, timer, stop}}, nil
	}
	defer stop()
	defer resp.Body.Close()
	responseBody, err := io.ReadAll(io.LimitReader(resp.Body, maxForwardResponse+1))
	if err != nil {
		return nil, forwardFault(to, err)
	}
	var envelope struct{ Data, Error, Meta json.RawMessage }
	if len(responseBody) > maxForwardResponse || json.Unmarshal(responseBody, &envelope) != nil || envelope.Meta == nil || (envelope.Data == nil) == (envelope.Error == nil) {
		return nil, forwardFault(to, fmt.Errorf("its response with status %d cannot be decoded", resp.StatusCode))
	}
	return rest.Verbatim{Body: io.NopCloser(bytes.NewReader(responseBody))}, nil
}

var errLeaderTimeout = errors.New("it did not respond in time")

// forwardFault returns the fault.Fault for a request to the leader that failed with err. The leader may have executed
// the request nevertheless.
func forwardFault(to uint64, err error) error {
	reason := "its response is not valid, or the connection to it failed: the request may have been carried out"
	var op *net.OpError
	var plain tls.RecordHeaderError
	switch {
	case errors.Is(err, errLeaderTimeout):
		reason = "it did not respond in time: the request may have been carried out"
	case errors.As(err, &op) && op.Op == "dial":
		reason = "it cannot be reached"
	case errors.As(err, &plain), errors.Is(err, http.ErrSchemeMismatch):
		reason = "it does not use TLS, but this member does: configure a certificate on all members"
	}
	return fault.New(fault.BadGateway, "forward to member %d, the leader: %s", to, reason).MayRetry().Because(err)
}

// forwardedBody is the body of a leader's response, which is streamed to the client. Each Read must return within
// listPieceTimeout.
type forwardedBody struct {
	body  io.ReadCloser
	to    uint64
	timer *time.Timer
	stop  func()
}

func (t *forwardedBody) Read(b []byte) (int, error) {
	t.timer.Reset(listPieceTimeout)
	n, err := t.body.Read(b)
	t.timer.Stop() // the time between two reads does not count
	if err != nil && err != io.EOF {
		err = forwardFault(t.to, err)
	}
	return n, err
}

func (t *forwardedBody) Close() error {
	t.stop()
	return t.body.Close()
}
