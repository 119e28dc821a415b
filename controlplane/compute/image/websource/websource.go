// Package websource downloads images from https:// URLs that tenants name. The main types are Client and Body.
//
// Tenants must not reach the operator's own network through a member. These rules prevent that:
//
//   - Only https is used, also after a redirect. Proxies of the environment are not used.
//   - The client connects only to global unicast addresses that no special-purpose registry lists (IANA, RFC 6890), and
//     to addresses that the operator allows. The address is checked when the socket is connected, after the name was
//     resolved. A name that resolves to another address the second time (DNS rebinding) is therefore refused too.
//   - A response must have a Content-Length and an uncompressed body. Endless bodies, and compressed bodies that expand
//     without limit, are therefore refused.
//   - Errors contain neither addresses nor bytes of a response.
//
// If the connection breaks during a download, the package continues the download with a Range request. The download
// fails if the file has changed meanwhile. It also fails if the server sends neither a strong ETag nor Last-Modified,
// because the bytes of two versions of the file could then be mixed.
//
// The package must not know images, records or members.
package websource

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// maxRedirects is the maximum number of redirects that are followed.
	maxRedirects = 5
	// connectTime is the maximum time for connecting to a server, and for its TLS handshake.
	connectTime = 10 * time.Second
	// headerTime is the maximum time until a server sends the header of its response.
	headerTime = 30 * time.Second
	// defaultStall is the value of Options.Stall if that is 0.
	defaultStall = 30 * time.Second
	// maxAttempts is the maximum number of consecutive attempts that bring no bytes.
	maxAttempts = 5
)

// Options configures a Client.
type Options struct {
	// Allow lists prefixes of special-purpose addresses, such as private ones, to which connections are allowed.
	Allow []netip.Prefix
	// MaxBytes is the maximum length of a body, in bytes. Required.
	MaxBytes int64
	// Roots are the authorities for servers' certificates; nil means those of the system.
	Roots *x509.CertPool
	// Stall is how long a server may send nothing before the download is continued on another connection; 0 means 30
	// seconds.
	Stall time.Duration
	// Pause is the time between the first two attempts of a series. Each further pause is twice as long. 0 means one
	// second.
	Pause time.Duration
}

// Client opens sources.
type Client struct {
	opts Options
	http *http.Client
}

// New returns a Client.
func New(opts Options) *Client {
	if opts.Stall == 0 {
		opts.Stall = defaultStall
	}
	if opts.Pause == 0 {
		opts.Pause = time.Second
	}
	c := &Client{opts: opts}
	dialer := &net.Dialer{Timeout: connectTime, ControlContext: c.checkAddress}
	c.http = &http.Client{
		Transport: &http.Transport{
			DialContext: dialer.DialContext, TLSHandshakeTimeout: connectTime, ResponseHeaderTimeout: headerTime,
			TLSClientConfig: &tls.Config{RootCAs: opts.Roots, MinVersion: tls.VersionTLS12}, DisableCompression: true,
			DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: func(r *http.Request, via []*http.Request) error {
			if len(via) > maxRedirects {
				return refuse("the server redirects more than %d times", maxRedirects)
			}
			return CheckURL(r.URL)
		},
	}
	return c
}

// Error is an error whose text may be shown to the tenant who named the source.
type Error struct{ text string }

func (e *Error) Error() string { return e.text }

func refuse(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

// CheckURL returns an *Error unless u is an https:// URL with a host and without a user name.
func CheckURL(u *url.URL) error {
	switch {
	case u.Scheme != "https":
		return refuse("only https is served, not %q", u.Scheme)
	case u.Hostname() == "":
		return refuse("the URL has no host")
	case u.User != nil:
		return refuse("the URL has a user name or password")
	}
	return nil
}

// checkAddress is the ControlContext of the dialer. It is called with the address to which the socket will be
// connected.
func (c *Client) checkAddress(_ context.Context, _, address string, _ syscall.RawConn) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return refuse("the address of the server is not an IP address")
	}
	if !c.permits(at.Addr()) && !mutant.On(mutant.FetchAnyAddress) {
		return refuse("the server has an address that images must not be fetched from")
	}
	return nil
}

// permits reports whether the client may connect to an address.
func (c *Client) permits(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	for _, p := range c.opts.Allow {
		if p.Contains(a) {
			return true
		}
	}
	if !a.IsGlobalUnicast() || a.IsPrivate() {
		return false
	}
	for _, p := range special {
		if p.Contains(a) {
			return false
		}
	}
	return true
}

// special lists the special-purpose prefixes that IsGlobalUnicast and IsPrivate do not cover. The prefixes for
// addresses that embed an IPv4 address (NAT64, 6to4, Teredo) are included, because the embedded address may be private.
var special = prefixes(
	"0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
	"::/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fec0::/10",
)

func prefixes(texts ...string) (out []netip.Prefix) {
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

// Open requests a URL and returns its body. It returns an *Error if the source is refused or cannot be downloaded. The
// download ends with ctx.
func (c *Client) Open(ctx context.Context, text string) (*Body, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, refuse("it is not a URL")
	}
	if err := CheckURL(u); err != nil {
		return nil, err
	}
	b := &Body{c: c, ctx: ctx, url: u.String(), size: -1}
	if err := b.connect(); err != nil {
		return nil, err
	}
	return b, nil
}

// Body is the body of a source. Read continues the download when a connection breaks.
type Body struct {
	c   *Client
	ctx context.Context
	url string
	// size is the length of the body in bytes, or -1 before the first response. done is the number of bytes that were
	// read. tag is the strong ETag or the Last-Modified of the first response, or empty if the server sent neither.
	size, done int64
	tag        string
	resp       *http.Response
	cancel     context.CancelFunc
	// barren is the number of attempts since the last byte was received.
	barren int
}

// Size returns the length of the body, in bytes.
func (b *Body) Size() int64 { return b.size }

// Close ends the download.
func (b *Body) Close() error {
	if b.resp == nil {
		return nil
	}
	b.cancel()
	err := b.resp.Body.Close()
	b.resp = nil
	return err
}

func (b *Body) Read(p []byte) (int, error) {
	for {
		if b.done == b.size {
			return 0, io.EOF
		}
		if b.resp == nil {
			if err := b.connect(); err != nil {
				return 0, err
			}
		}
		stalled := time.AfterFunc(b.c.opts.Stall, b.cancel)
		n, err := b.resp.Body.Read(p[:min(int64(len(p)), b.size-b.done)])
		stalled.Stop()
		b.done += int64(n)
		if n > 0 {
			b.barren = 0
			return n, nil
		}
		if err == nil {
			continue
		}
		b.Close()
		if err := b.ctx.Err(); err != nil {
			return 0, err
		}
	}
}

// connect requests the rest of the body. After a temporary failure it pauses and tries again, at most maxAttempts times
// in a row.
func (b *Body) connect() error {
	for {
		b.barren++
		err := b.request()
		var fatal *Error
		switch {
		case err == nil:
			return nil
		case errors.As(err, &fatal):
			return fatal
		case b.ctx.Err() != nil:
			return b.ctx.Err()
		case b.barren >= maxAttempts:
			return refuse("the server cannot be reached, or the connection to it breaks")
		}
		select {
		case <-time.After(b.c.opts.Pause << (b.barren - 1)):
		case <-b.ctx.Done():
			return b.ctx.Err()
		}
	}
}

// request makes one request. An *Error is permanent, and any other error is temporary.
func (b *Body) request() error {
	ctx, cancel := context.WithCancel(b.ctx)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, b.url, nil)
	if err != nil {
		cancel()
		return refuse("it is not a URL")
	}
	r.Header.Set("Accept-Encoding", "identity")
	r.Header.Set("User-Agent", "trivet")
	if b.done > 0 {
		if b.tag == "" {
			cancel()
			return refuse("the connection broke, and the server names no version of the file (ETag, Last-Modified) with " +
				"which to continue")
		}
		r.Header.Set("Range", fmt.Sprintf("bytes=%d-", b.done))
		r.Header.Set("If-Range", b.tag)
	}
	resp, err := b.c.http.Do(r)
	if err != nil {
		cancel()
		return certificateError(err)
	}
	if err := b.accept(resp); err != nil {
		cancel()
		resp.Body.Close()
		return err
	}
	b.resp, b.cancel = resp, cancel
	return nil
}

// certificateError returns an *Error if err is about the server's certificate, because such an error is permanent.
func certificateError(err error) error {
	var bad *tls.CertificateVerificationError
	if errors.As(err, &bad) {
		return refuse("the certificate of the server is not valid")
	}
	return err
}

// accept checks the header of a response, and stores the length and the version of the file.
func (b *Body) accept(resp *http.Response) error {
	switch {
	case resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests:
		return fmt.Errorf("the server answered %d", resp.StatusCode)
	case b.done > 0 && resp.StatusCode == http.StatusOK:
		return refuse("the file changed while it was downloaded, or the server cannot continue a download")
	case resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusPartialContent:
		return refuse("the server answered %d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
	}
	if coding := resp.Header.Get("Content-Encoding"); coding != "" && coding != "identity" {
		return refuse("the server sends it compressed (Content-Encoding)")
	}
	if b.done > 0 {
		return b.acceptRest(resp)
	}
	switch {
	case resp.StatusCode != http.StatusOK:
		return refuse("the server sent a part that was not asked for")
	case resp.ContentLength < 0:
		return refuse("the server does not say how long it is (Content-Length)")
	case resp.ContentLength > b.c.opts.MaxBytes && !mutant.On(mutant.FetchAnyLength):
		return refuse("it is larger than %d bytes", b.c.opts.MaxBytes)
	case b.size >= 0 && resp.ContentLength != b.size:
		return refuse("the file changed while it was downloaded")
	}
	b.size, b.tag = resp.ContentLength, tagOf(resp)
	return nil
}

// tagOf returns the validator of the file's version in a response: the strong ETag, or else Last-Modified. It returns
// "" if the response has neither.
func tagOf(resp *http.Response) string {
	tag := resp.Header.Get("ETag")
	if tag == "" || strings.HasPrefix(tag, "W/") { // RFC 9110, section 13.1.5: If-Range needs a strong validator
		return resp.Header.Get("Last-Modified")
	}
	return tag
}

// acceptRest checks the header of a response with the rest of the body.
func (b *Body) acceptRest(resp *http.Response) error {
	var first, last, size int64
	if _, err := fmt.Sscanf(resp.Header.Get("Content-Range"), "bytes %d-%d/%d", &first, &last, &size); err != nil {
		return refuse("the server cannot continue a download")
	}
	// The validator is compared here too, because some servers ignore If-Range.
	tag := tagOf(resp)
	if first != b.done || last != b.size-1 || size != b.size || tag != "" && tag != b.tag {
		return refuse("the file changed while it was downloaded")
	}
	return nil
}
