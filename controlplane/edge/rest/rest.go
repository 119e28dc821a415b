// Package rest builds the HTTP servers of all services: the JSON envelope (part 2.1 of the wire contract, docs/api.md),
// errors (part 7), strict JSON bodies, authentication, limits, /health and /ready, metrics and the access log.
//
// A service registers its routes on a Server. A Handler returns data or an error and does not write the response
// itself. A response that is too long for memory is returned as a Stream, which is sent while it is generated. An
// EventHandler sends server-sent events until its client closes the connection, and a DownloadHandler sends bytes. The response of another member is
// returned as Verbatim and forwarded unchanged. An Upgrade takes over the connection, for a websocket. The package must
// not know records or services.
package rest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/gorilla/mux"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/loopback"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// MaxBody is the default limit of the size of a request body, in bytes.
const MaxBody = 1 << 20

// Handler handles a request. The returned value is sent as `data` in the JSON envelope; an error is sent as `error`.
type Handler func(w *Response, r *http.Request) (data any, err error)

// Response holds the parts of the response, besides its data, that a handler may set.
type Response struct {
	// Status is the HTTP status of a successful response; 200 unless set.
	Status int
	// Failure is the error code that is sent for internal errors. It is set for operations to which the wire contract
	// assigns a code of their own. Empty means the general code.
	Failure string
	// Codes selects the column of the error table in package fault. It is Options.Service unless set.
	Codes  fault.Service
	header http.Header
}

// Header returns the HTTP header of the response, which the handler may change.
func (w *Response) Header() http.Header { return w.header }

// Options configures a Server.
type Options struct {
	// Service selects the column of the error table in package fault: the status and code for each kind of error.
	Service fault.Service
	// Name is the service's name in metrics and log lines.
	Name string
	// Verifier checks bearer tokens. It is nil for a service without routes that need one.
	Verifier auth.Verifier
	// Ready returns nil if the service can serve requests, and otherwise the error that /ready reports.
	Ready func(context.Context) error
	// Document is the OpenAPI document of the routes as JSON, which GET /openapi.json returns. If it is empty, there is no
	// such route.
	Document []byte
	Log      *slog.Logger
	// Metrics records the durations of requests; required.
	Metrics *Metrics
	// MaxBody is the limit of the size of a request body, in bytes; 0 means the constant MaxBody.
	MaxBody int64
	// Audit is notified of calls that were refused, and of mutating calls that failed. Optional.
	Audit auth.Auditor
	// Hosts lists further allowed host names for routes without a token. IP addresses and localhost are always allowed.
	Hosts []string
	// OpenStream counts a stream of events against the limits of its caller, and returns a context that ends with a
	// fault as its cause when the token becomes invalid. The server calls leave when the stream has ended. If OpenStream
	// is nil, streams have no limit.
	OpenStream func(ctx context.Context, token string) (_ context.Context, leave func(), err error)
}

// Server is the http.Handler of one HTTP service, with the service's routes.
type Server struct {
	opts   Options
	router *mux.Router
	routes []Route
	// limits holds the maximum body size, in bytes, of the routes that have one of their own, by path.
	limits map[string]int64
	// resolvers holds the functions that look up names in paths, by the segment of the path before the name.
	resolvers map[string]Resolver
}

// Routes returns all routes of the server. It is for tests that call each of them.
func (s *Server) Routes() []Route { return s.routes }

// New returns a server that already has the routes /health and /ready.
func New(opts Options) *Server {
	if opts.MaxBody == 0 {
		opts.MaxBody = MaxBody
	}
	s := &Server{opts: opts, router: mux.NewRouter().SkipClean(true).UseEncodedPath(), limits: map[string]int64{}, resolvers: map[string]Resolver{}}
	s.router.NotFoundHandler = s.handler("unknown", func(_ *Response, r *http.Request) (any, error) {
		return nil, fault.New(fault.NotFound, "no such path: %s", r.URL.Path)
	})
	s.router.MethodNotAllowedHandler = s.handler("unknown", func(w *Response, r *http.Request) (any, error) {
		w.Header().Set("Allow", strings.Join(s.allowed(r), ", "))
		return nil, fault.New(fault.MethodNotAllowed, "%s does not take %s", r.URL.Path, r.Method)
	})
	s.standardRoutes()
	return s
}

// Handle adds a route for callers with a valid token. The parameter as is the gRPC method whose rule authorizes calls
// of the route.
func (s *Server) Handle(method, path string, as auth.Method, h Handler, options ...Option) {
	route := newRoute(method, path, as, "", options)
	s.open(route, func(w *Response, r *http.Request) (_ any, err error) {
		defer func() { s.reportFailure(r, as, err) }()
		if r, _, err = s.authenticate(r); err != nil {
			return nil, err
		}
		if err := route.checkStrict(r); err != nil {
			return nil, err
		}
		data, err := h(w, r)
		if err == nil {
			auth.ReportSuccess(s.opts.Audit, auth.CallerOf(r.Context()), as)
		}
		return data, err
	})
}

// authenticate verifies the token of a request. It returns the request with the caller in its context and with IDs in
// place of names in its path, and the token.
// If it returns an error although the token is valid, the context of the returned request has the caller, for the
// audit.
func (s *Server) authenticate(r *http.Request) (*http.Request, string, error) {
	token, err := auth.Bearer(r.Header.Get("Authorization"))
	if err != nil {
		return r, "", err
	}
	caller, err := s.opts.Verifier.Verify(r.Context(), token)
	if err != nil {
		return r, "", err
	}
	caller.RequestID, caller.Address, caller.Target = RequestID(r.Context()), Remote(r), r.Method+" "+r.URL.EscapedPath()
	caller.IdempotencyKey = r.Header.Get("Idempotency-Key")
	r = r.WithContext(auth.With(auth.WithToken(auth.WithProjects(r.Context(), s.opts.Verifier), token), caller, auth.REST))
	if err := auth.CheckIdempotencyKey("Idempotency-Key", caller.IdempotencyKey); err != nil {
		return r, "", err
	}
	caller.Chosen, err = auth.Chosen("Trivet-Org", r.Header.Values("Trivet-Org"), "Trivet-Project", r.Header.Values("Trivet-Project"))
	if err != nil {
		return r, "", err
	}
	r, err = s.replaceNames(r)
	return r, token, err
}

// reportFailure passes a call that ended with err to auth.ReportFailure. It does nothing if err is nil.
func (s *Server) reportFailure(r *http.Request, as auth.Method, err error) {
	if err == nil {
		return
	}
	auth.ReportFailure(s.opts.Audit, auth.CallerOf(r.Context()), as, Outcome(err), RequestID(r.Context()), Remote(r))
}

// Outcome returns the fault that the audit records for a call that ended with err.
func Outcome(err error) *fault.Fault {
	if f, ok := fault.From(err); ok {
		return f
	}
	if f := interrupted(err); f != nil {
		return f
	}
	return fault.New(fault.Internal, "internal error")
}

// interrupted returns a DeadlineExceeded fault if err says that a call was canceled or timed out, and nil for all other
// errors.
func interrupted(err error) *fault.Fault {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fault.New(fault.DeadlineExceeded, "the request was not finished in time").MayRetry()
	}
	return nil
}

// HandleBody adds a route like Handle whose request body may have up to limit bytes, and need not be JSON.
func (s *Server) HandleBody(method, path string, as auth.Method, limit int64, h Handler, options ...Option) {
	s.limits[path] = limit
	s.Handle(method, path, as, h, options...)
}

// Remote returns the IP address that a request came from, without the port.
func Remote(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// FromLoopback reports whether both addresses of the request's connection are loopback addresses, as package loopback
// requires for callers with more rights.
func FromLoopback(r *http.Request) bool {
	if mutant.On(mutant.LoopbackForAll) {
		return true
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	remote, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && loopback.Both(local, net.TCPAddrFromAddrPort(remote))
}

// HandleOpen adds a route that requires no token. The parameter why states the reason. A web page in an operator's
// browser can send requests to such a route too, so the route refuses requests for which RefuseBrowser returns an
// error.
func (s *Server) HandleOpen(method, path, why string, h Handler, options ...Option) {
	route := newRoute(method, path, "", why, options)
	s.open(route, func(w *Response, r *http.Request) (any, error) {
		if err := s.RefuseBrowser(r); err != nil {
			return nil, err
		}
		if err := route.checkStrict(r); err != nil {
			return nil, err
		}
		return h(w, r)
	})
}

// HandleBare adds a route whose handler makes all checks itself, except those of strict requests. The parameter why
// states the reason.
func (s *Server) HandleBare(method, path, why string, h Handler, options ...Option) {
	route := newRoute(method, path, "", why, options)
	s.open(route, func(w *Response, r *http.Request) (any, error) {
		if err := route.checkStrict(r); err != nil {
			return nil, err
		}
		return h(w, r)
	})
}

func (s *Server) open(route Route, h Handler) {
	s.routes = append(s.routes, route)
	methods := []string{route.Method}
	if route.Method == http.MethodGet {
		methods = append(methods, http.MethodHead) // the response without its body: RFC 9110, section 9.3.2
	}
	s.router.Handle(route.Path, s.handler(route.Path, h)).Methods(methods...)
}

// allowed returns the HTTP methods for which the server has a route that matches the path of r.
func (s *Server) allowed(r *http.Request) (methods []string) {
	for _, m := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		ask := *r
		ask.Method = m
		var match mux.RouteMatch
		if s.router.Match(&ask, &match) && match.MatchErr == nil {
			methods = append(methods, m)
		}
	}
	return methods
}

// ServeHTTP implements http.Handler. It calls the handler of the route that matches the request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.router.ServeHTTP(w, r) }

type requestID struct{}

// RequestID returns the ID of the request that ctx belongs to, or "" if there is none.
func RequestID(ctx context.Context) string {
	id, _ := ctx.Value(requestID{}).(string)
	return id
}

// handler returns an http.Handler that runs h with a request ID, a limit on the body size, and panic recovery. It sends
// the result in the JSON envelope, and records the log line and the metrics. The time that h takes is not limited.
func (s *Server) handler(route string, h Handler) http.Handler {
	limit := cmp.Or(s.limits[route], s.opts.MaxBody)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		id := uuid.NewString()
		r = r.WithContext(context.WithValue(r.Context(), requestID{}, id))
		r.Body = http.MaxBytesReader(w, r.Body, limit)
		resp := &Response{Status: http.StatusOK, Codes: s.opts.Service, header: w.Header()}
		data, err := s.call(h, resp, r)
		// The handler may have taken longer than the server's WriteTimeout. Response writers of tests have no deadlines.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(chunkTime))
		status, began := resp.Status, false
		if err == nil {
			began, err = s.answer(w, r, status, data, id)
		}
		if err != nil && !began {
			f := s.faultOf(r, id, err)
			var body envelope
			status, body = failure(f, resp.Codes, resp.Failure)
			if f.Retry {
				w.Header().Set("Retry-After", strconv.Itoa(int(f.RetryDelay().Seconds())))
			}
			if status == http.StatusUnauthorized {
				w.Header().Set("WWW-Authenticate", "Bearer")
			}
			s.write(w, status, body, id)
		}
		s.opts.Metrics.observe(s.opts.Name, route, r.Method, status, time.Since(start))
		if err != nil && began {
			if r.Context().Err() == nil {
				s.opts.Log.Error("response was interrupted", "service", s.opts.Name, "req", id, "method", r.Method, "path", r.URL.Path, "err", err)
			}
			panic(http.ErrAbortHandler) // net/http closes the connection and logs nothing
		}
	})
}

// answer writes the data that a handler returned. If answer returns an error, the response is incomplete. The result
// began reports whether part of the response was sent.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, status int, data any, id string) (began bool, err error) {
	switch data := data.(type) {
	case Stream:
		return stream(w, r, status, data, id)
	case Upgrade:
		return data(w)
	case Verbatim:
		return verbatim(w, r, status, data)
	case events:
		return s.sendEvents(w, r, data, id)
	case download:
		return sendDownload(w, r, data)
	}
	s.write(w, status, envelope{Data: data}, id)
	return true, nil
}

// call runs a handler and turns a panic into an error.
func (s *Server) call(h Handler, w *Response, r *http.Request) (data any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return h(w, r)
}

// faultOf returns the fault that is sent to the caller for an error. A context that was canceled or timed out gives a
// DeadlineExceeded fault. Any other error that is not a fault.Fault is logged, and the caller gets an internal error
// that contains only the request ID.
func (s *Server) faultOf(r *http.Request, id string, err error) *fault.Fault {
	if f, ok := fault.From(err); ok {
		return f
	}
	if f := interrupted(err); f != nil {
		return f
	}
	s.opts.Log.Error("request failed", "service", s.opts.Name, "req", id, "method", r.Method, "path", r.URL.Path, "err", err)
	return fault.New(fault.Internal, "internal error, request %s", id)
}

// maxMessage is the longest error message that is sent, in bytes. Longer ones, which may quote the request, are cut.
const maxMessage = 2 << 10

// failure returns the HTTP status and the body of an error response, with the codes of the given column of the error
// table. If the parameter code is not empty, it replaces the code of an internal error.
func failure(f *fault.Fault, codes fault.Service, code string) (int, envelope) {
	shape := f.Kind.REST(codes)
	if f.Kind == fault.Internal && code != "" {
		shape.Code = code
	}
	body := &errorBody{Code: shape.Code, Message: f.Message}
	if len(body.Message) > maxMessage {
		body.Message = strings.ToValidUTF8(body.Message[:maxMessage], "") + " …"
	}
	if len(f.Details) > 0 || f.Reason != "" || f.Field != "" {
		details := map[string]any{}
		for k, v := range f.Details {
			details[k] = v
		}
		if f.Reason != "" {
			details["reason"] = f.Reason
		}
		if f.Field != "" {
			details["field"] = f.Field
		}
		body.Details = details
	}
	return shape.Status, envelope{Error: body}
}

type envelope struct {
	Data  any        `json:"data,omitempty"`
	Error *errorBody `json:"error,omitempty"`
	Meta  meta       `json:"meta"`
}

type errorBody struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Details any    `json:"details,omitempty"`
}

type meta struct {
	RequestID string `json:"request_id"`
	Timestamp string `json:"timestamp"`
}

func (s *Server) write(w http.ResponseWriter, status int, body envelope, id string) {
	body.Meta = metaOf(id)
	text, err := json.Marshal(body)
	if err != nil {
		s.opts.Log.Error("encode response", "service", s.opts.Name, "req", id, "err", err)
		status, text = http.StatusInternalServerError, []byte(`{"error":{"code":"INTERNAL","message":"internal error, request `+id+`"}}`)
	}
	begin(w, status, jsonMedia)
	w.Write(append(text, '\n'))
}

// jsonMedia is the media type of all responses except downloads and streams of events.
const jsonMedia = "application/json"

func begin(w http.ResponseWriter, status int, media string) {
	w.Header().Set("Content-Type", media)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
}

func metaOf(id string) meta {
	return meta{RequestID: id, Timestamp: time.Now().UTC().Format(time.RFC3339Nano)}
}
