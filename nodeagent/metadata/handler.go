package metadata

import (
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// handler answers the requests on a listener.
type handler struct {
	options Options
	gate    *gate

	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup // calls of ServeHTTP that began before closed was set
}

// ServeHTTP answers a request on a connection from a gatedListener.
func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !h.begin() {
		panic(http.ErrAbortHandler) // closes the connection without a response
	}
	defer h.running.Done()
	h.serve(w, r)
}

// begin counts a request unless the handler is closed.
func (h *handler) begin() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.closed {
		h.running.Add(1)
	}
	return !h.closed
}

// close waits until no request is being answered. The connections must be closed before.
func (h *handler) close() {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.running.Wait()
}

func (h *handler) serve(w http.ResponseWriter, r *http.Request) {
	c, ok := r.Context().Value(connectionKey{}).(*connection)
	if !ok {
		reply(w, http.StatusInternalServerError)
		return
	}
	if !h.gate.request(c.caller) {
		w.Header().Set("Retry-After", "1")
		reply(w, http.StatusServiceUnavailable)
		return
	}
	i, ok := h.options.Lookup(c.caller.vpc, c.source)
	if !ok || i.Port != c.caller.port {
		w.Header().Set("Connection", "close") // a client that now has a port succeeds with a new connection
		reply(w, http.StatusNotFound)
		return
	}
	if r.Header["X-Forwarded-For"] != nil {
		reply(w, http.StatusForbidden)
		return
	}
	if _, err := io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, h.options.Limits.BodyBytes)); err != nil {
		w.Header().Set("Connection", "close")
		reply(w, http.StatusRequestEntityTooLarge)
		return
	}
	if r.URL.Path == tokenPath {
		h.serveToken(w, r, c.caller)
		return
	}
	h.serveContent(w, r, c.caller, i)
}

// serveToken answers a request for a session token.
func (h *handler) serveToken(w http.ResponseWriter, r *http.Request, c caller) {
	if r.Method != http.MethodPut {
		w.Header().Set("Allow", http.MethodPut)
		reply(w, http.StatusMethodNotAllowed)
		return
	}
	seconds, err := strconv.ParseUint(r.Header.Get(tokenTTLHeader), 10, 32)
	ttl := time.Duration(seconds) * time.Second
	if err != nil || ttl == 0 || ttl > maxTokenTTL {
		reply(w, http.StatusBadRequest)
		return
	}
	w.Header().Set(tokenTTLHeader, strconv.FormatUint(seconds, 10))
	send(w, textPlain, []byte(issueToken(h.options.TokenKey, c, h.options.Now().Add(ttl))))
}

// serveContent answers a request for a path of the trees.
func (h *handler) serveContent(w http.ResponseWriter, r *http.Request, c caller, i *Instance) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		reply(w, http.StatusMethodNotAllowed)
		return
	}
	token, given := r.Header[tokenHeader]
	if (given || i.TokensRequired) &&
		(len(token) != 1 || !verifyToken(h.options.TokenKey, c, token[0], h.options.Now())) {
		reply(w, http.StatusUnauthorized)
		return
	}
	content, contentType, ok := resolve(i, r.URL.Path)
	if !ok {
		reply(w, http.StatusNotFound)
		return
	}
	send(w, contentType, content)
}

// reply sends a response that has only a status.
func reply(w http.ResponseWriter, status int) { http.Error(w, http.StatusText(status), status) }

// send sends a successful response. An error of the connection concerns only the client.
func send(w http.ResponseWriter, contentType string, content []byte) {
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(content)))
	w.Header().Set("Cache-Control", "no-store") // for proxies in the guest
	_, _ = w.Write(content)
}
