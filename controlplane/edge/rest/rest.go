// Package rest is the half of every HTTP service that does not depend on the service: the envelope (the spec's part
// 2.1), errors (part 7), strict JSON bodies, authentication, limits, /health and /ready, metrics and the access log.
//
// A service gives a Server its routes; a Handler returns data or an error and never writes itself. What is too long to be
// held is a Stream, which is written as it is made; what another member answered is Verbatim. It knows no records and no
// service.
package rest

import (
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
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/loopback"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// MaxBody is the limit of a request body in bytes, unless a service has another.
const MaxBody = 1 << 20

// Handler answers a request with the payload of `data` and a status.
type Handler func(w *Response, r *http.Request) (data any, err error)

// Response is what a handler may add to its answer.
type Response struct {
	// Status is 200 unless set.
	Status int
	// Failure is the code of an internal error, for an operation to which the spec gives one of its own.
	Failure string
	header  http.Header
}

// Header is the answer's.
func (w *Response) Header() http.Header { return w.header }

// Options of a Server.
type Options struct {
	// Service picks the column of the error table.
	Service fault.Service
	// Name labels metrics and log lines.
	Name string
	// Verifier checks bearer tokens. Nil for a service whose routes need none.
	Verifier auth.Verifier
	// Ready says why the service cannot work just now; nil when it can.
	Ready func(context.Context) error
	Log   *slog.Logger
	// Metrics takes the request counters; required.
	Metrics *Metrics
	// MaxBody is the limit of a request body in bytes; 0 is the constant of that name.
	MaxBody int64
	// Audit is told of calls that were refused, or failed to change something; optional.
	Audit auth.Auditor
	// Hosts are names, beside IP addresses and localhost, by which routes without a token may be called.
	Hosts []string
}

// Server routes one HTTP service.
type Server struct {
	opts   Options
	router *mux.Router
	routes []Route
}

// Route is one way to call a server.
type Route struct {
	Method, Path string
	// As is the RPC that the route stands for, by which its callers are judged. Without one, Open says why none is.
	As   auth.Method
	Open string
}

// Routes lists what a server serves, for the tests that walk all of it.
func (s *Server) Routes() []Route { return s.routes }

// New makes a server with /health and /ready.
func New(opts Options) *Server {
	if opts.MaxBody == 0 {
		opts.MaxBody = MaxBody
	}
	s := &Server{opts: opts, router: mux.NewRouter().SkipClean(true).UseEncodedPath()}
	s.router.NotFoundHandler = s.handler("unknown", func(_ *Response, r *http.Request) (any, error) {
		return nil, fault.New(fault.NotFound, "no such path: %s", r.URL.Path)
	})
	s.router.MethodNotAllowedHandler = s.handler("unknown", func(w *Response, r *http.Request) (any, error) {
		w.Header().Set("Allow", strings.Join(s.allowed(r), ", "))
		return nil, fault.New(fault.MethodNotAllowed, "%s does not take %s", r.URL.Path, r.Method)
	})
	s.open(http.MethodGet, "/health", "", "says that the process serves", func(*Response, *http.Request) (any, error) {
		return map[string]string{"status": "healthy"}, nil
	})
	s.routes = append(s.routes, Route{Method: http.MethodGet, Path: "/ready", Open: "says whether the cluster can work"})
	s.router.Handle("/ready", http.HandlerFunc(s.ready)).Methods(http.MethodGet, http.MethodHead)
	return s
}

func (s *Server) ready(w http.ResponseWriter, r *http.Request) {
	id := uuid.NewString()
	if err := s.opts.Ready(r.Context()); err != nil {
		s.write(w, http.StatusServiceUnavailable, envelope{Error: &errorBody{Code: "SERVICE_UNAVAILABLE", Message: err.Error()}}, id)
		return
	}
	s.write(w, http.StatusOK, envelope{Data: map[string]string{"status": "ready"}}, id)
}

// Handle adds a route for callers with a valid token. It stands for an RPC: who may call that may call it.
func (s *Server) Handle(method, path string, as auth.Method, h Handler) {
	s.open(method, path, as, "", func(w *Response, r *http.Request) (_ any, err error) {
		var caller *cloud.Caller
		defer func() {
			if err != nil {
				f, ok := fault.From(err)
				if !ok {
					f = fault.New(fault.Internal, "internal error")
				}
				auth.Report(s.opts.Audit, caller, as, f, RequestID(r.Context()), Remote(r))
			}
		}()
		token, err := auth.Bearer(r.Header.Get("Authorization"))
		if err != nil {
			return nil, err
		}
		if caller, err = s.opts.Verifier.Verify(r.Context(), token); err != nil {
			return nil, err
		}
		caller.RequestID, caller.Address, caller.Target = RequestID(r.Context()), Remote(r), r.Method+" "+r.URL.EscapedPath()
		caller.IdempotencyKey = r.Header.Get("Idempotency-Key")
		if err := auth.CheckIdempotencyKey("Idempotency-Key", caller.IdempotencyKey); err != nil {
			return nil, err
		}
		caller.Chosen, err = auth.Chosen("Trivet-Org", r.Header.Values("Trivet-Org"), "Trivet-Project", r.Header.Values("Trivet-Project"))
		if err != nil {
			return nil, err
		}
		return h(w, r.WithContext(auth.With(auth.WithProjects(r.Context(), s.opts.Verifier), caller, auth.REST)))
	})
}

// Remote is the address that a request came from, without the port.
func Remote(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// FromLoopback reports whether both addresses of the request's connection are loopback addresses: see package loopback.
func FromLoopback(r *http.Request) bool {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	remote, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && loopback.Both(local, net.TCPAddrFromAddrPort(remote))
}

// HandleOpen adds a route that asks for no token; why says why it need not. A page in a browser on an operator's laptop
// can reach it too, so it refuses what only a browser sends, or would be tricked into sending.
func (s *Server) HandleOpen(method, path, why string, h Handler) {
	s.open(method, path, "", why, func(w *Response, r *http.Request) (any, error) {
		if err := s.NotABrowser(r); err != nil {
			return nil, err
		}
		return h(w, r)
	})
}

// HandleBare adds a route that admits everybody: its handler sees to that itself, as why says.
func (s *Server) HandleBare(method, path, why string, h Handler) { s.open(method, path, "", why, h) }

func (s *Server) open(method, path string, as auth.Method, why string, h Handler) {
	s.routes = append(s.routes, Route{method, path, as, why})
	methods := []string{method}
	if method == http.MethodGet {
		methods = append(methods, http.MethodHead) // the answer without its body: RFC 9110 part 9.3.2
	}
	s.router.Handle(path, s.handler(path, h)).Methods(methods...)
}

// allowed lists the methods that the path of a request takes.
func (s *Server) allowed(r *http.Request) (methods []string) {
	for _, m := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodDelete} {
		ask := *r
		ask.Method = m
		var match mux.RouteMatch
		if s.router.Match(&ask, &match) && match.MatchErr == nil {
			methods = append(methods, m)
		}
	}
	return methods
}

// ServeHTTP makes a Server an http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.router.ServeHTTP(w, r) }

type requestID struct{}

// RequestID is the id of the request that a context belongs to.
func RequestID(ctx context.Context) string {
	id, _ := ctx.Value(requestID{}).(string)
	return id
}

// handler wraps a Handler: id, limits, recovery, envelope, log and metrics.
func (s *Server) handler(route string, h Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		id := uuid.NewString()
		r = r.WithContext(context.WithValue(r.Context(), requestID{}, id))
		r.Body = http.MaxBytesReader(w, r.Body, s.opts.MaxBody)
		resp := &Response{Status: http.StatusOK, header: w.Header()}
		data, err := s.call(h, resp, r)
		status, began := resp.Status, false
		if err == nil {
			began, err = s.answer(w, r, status, data, id)
		}
		if err != nil && !began {
			f := s.faultOf(r, id, err)
			var body envelope
			status, body = s.failure(f, resp.Failure)
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
				s.opts.Log.Error("answer broke off", "service", s.opts.Name, "req", id, "method", r.Method, "path", r.URL.Path, "err", err)
			}
			panic(http.ErrAbortHandler) // net/http cuts the connection and says nothing of it
		}
	})
}

// answer writes what a handler returned. An error leaves the answer unfinished; began says whether something was sent.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, status int, data any, id string) (began bool, err error) {
	switch data := data.(type) {
	case Stream:
		return stream(w, r, status, data, id)
	case Verbatim:
		return verbatim(w, r, status, data)
	}
	s.write(w, status, envelope{Data: data}, id)
	return true, nil
}

// call runs a handler; a panic is an internal error of this request alone.
func (s *Server) call(h Handler, w *Response, r *http.Request) (data any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return h(w, r)
}

// faultOf is what the caller may read of an error. What is not a Fault is ours: the log has it, the caller the
// request's id.
func (s *Server) faultOf(r *http.Request, id string, err error) *fault.Fault {
	if f, ok := fault.From(err); ok {
		return f
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fault.New(fault.DeadlineExceeded, "the request was not finished in time").MayRetry()
	}
	s.opts.Log.Error("request failed", "service", s.opts.Name, "req", id, "method", r.Method, "path", r.URL.Path, "err", err)
	return fault.New(fault.Internal, "internal error, request %s", id)
}

// maxMessage bounds what of a request comes back in the message that refuses it, in bytes.
const maxMessage = 2 << 10

// failure is the body of an error; code, when set, is that of an internal one.
func (s *Server) failure(f *fault.Fault, code string) (int, envelope) {
	shape := f.Kind.REST(s.opts.Service)
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
		s.opts.Log.Error("encode answer", "service", s.opts.Name, "req", id, "err", err)
		status, text = http.StatusInternalServerError, []byte(`{"error":{"code":"INTERNAL","message":"internal error, request `+id+`"}}`)
	}
	begin(w, status)
	w.Write(append(text, '\n'))
}

func begin(w http.ResponseWriter, status int) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
}

func metaOf(id string) meta {
	return meta{RequestID: id, Timestamp: time.Now().UTC().Format(time.RFC3339Nano)}
}

// Metrics counts requests of all services.
type Metrics struct{ seconds *prometheus.HistogramVec }

// NewMetrics registers the counters.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "trivet_http_request_seconds", Help: "Time to answer HTTP requests.",
		Buckets: []float64{.001, .0025, .005, .01, .02, .05, .1, .25, .5, 1, 5, 30},
	}, []string{"service", "route", "method", "status"})}
	reg.MustRegister(m.seconds)
	return m
}

func (m *Metrics) observe(service, route, method string, status int, d time.Duration) {
	switch method {
	case http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete:
	default:
		method = "other" // a caller chooses it; a label must not grow with that
	}
	m.seconds.WithLabelValues(service, route, method, fmt.Sprint(status)).Observe(d.Seconds())
}
