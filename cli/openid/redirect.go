package openid

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"
)

// redirect is an HTTP server on loopback to which the provider redirects the user's browser.
type redirect struct {
	server *http.Server
	done   chan struct{}
	came   chan came
}

// came is the result of the first redirect with the right state: an authorization code or an error.
type came struct {
	code string
	err  error
}

func listen(l net.Listener, state string) *redirect {
	r := &redirect{done: make(chan struct{}), came: make(chan came, 1)}
	r.server = &http.Server{
		Handler:     http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { r.serve(w, req, state) }),
		ReadTimeout: 5 * time.Second, WriteTimeout: 5 * time.Second, IdleTimeout: 5 * time.Second, MaxHeaderBytes: 16 << 10,
	}
	go func() {
		defer close(r.done)
		_ = r.server.Serve(l) // its error only reports that the server was closed
	}()
	return r
}

// wait waits for the first redirect with the expected state, and returns its authorization code or its error.
func (r *redirect) wait(ctx context.Context) (string, error) {
	select {
	case c := <-r.came:
		return c.code, c.err
	case <-r.done:
		return "", errors.New("wait for the browser: the listener ended")
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return "", errors.New("no login with the browser before the deadline: try again; --timeout gives it longer")
		}
		return "", ctx.Err()
	}
}

// close stops the server. It waits at most 2 seconds until the response to the browser is sent.
func (r *redirect) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if r.server.Shutdown(ctx) != nil {
		_ = r.server.Close()
	}
	<-r.done
}

func (r *redirect) serve(w http.ResponseWriter, req *http.Request, state string) {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Content-Security-Policy", "default-src 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Connection", "close")
	q, err := url.ParseQuery(req.URL.RawQuery)
	if req.URL.Path != path || req.Method != http.MethodGet || err != nil ||
		subtle.ConstantTimeCompare([]byte(q.Get("state")), []byte(state)) != 1 {
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprintf(w, page, "This is not the login that trivet waits for.")
		return
	}
	c := came{code: q.Get("code")}
	text := "Go back to the terminal: you can close this."
	switch {
	case q.Get("error") != "":
		c = came{err: fmt.Errorf("the provider refused the login: %q %q", clip(q.Get("error")), clip(q.Get("error_description")))}
		text = "You are not logged in. The terminal says why: you can close this."
	case c.code == "":
		c = came{err: errors.New("the provider sent no code")}
		text = "You are not logged in. The terminal says why: you can close this."
	}
	fmt.Fprintf(w, page, text)
	select {
	case r.came <- c:
	default: // a redirect with this state came before; later ones are ignored
	}
}

const page = "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>trivet</title></head><body><p>%s</p></body></html>\n"
