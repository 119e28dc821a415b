package rest

import (
	"bytes"
	"io"
	"net/http"

	"github.com/google/uuid"
)

// statusResponse is the data of /health and /ready.
type statusResponse struct {
	// healthy or ready.
	Status string `json:"status"`
}

// standardRoutes adds the routes that every server has: /health, /ready and, with Options.Document, /openapi.json.
func (s *Server) standardRoutes() {
	status := Returns(http.StatusOK, statusResponse{})
	s.HandleBare(http.MethodGet, "/health", "says that the process serves", func(*Response, *http.Request) (any, error) {
		return statusResponse{"healthy"}, nil
	}, status, Summary("Returns 200 while the process serves."))
	ready := newRoute(http.MethodGet, "/ready", "", "says whether the cluster can work", []Option{
		status, Summary("Returns 200 if the cluster can work, and 503 while it has no leader or is being set up."),
	})
	s.routes = append(s.routes, ready)
	s.router.Handle(ready.Path, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.ready(&ready, w, r) })).
		Methods(http.MethodGet, http.MethodHead)
	if len(s.opts.Document) > 0 {
		s.HandleBare(http.MethodGet, "/openapi.json", "describes the routes, which are public", s.document,
			ReturnsBare(jsonMedia, map[string]any{}), Summary("Returns the OpenAPI document of this port."))
	}
}

// ready serves /ready. Its requests are not in the metrics, and its error always has the same status and code.
func (s *Server) ready(route *Route, w http.ResponseWriter, r *http.Request) {
	id := uuid.NewString()
	if err := route.checkStrict(r); err != nil {
		status, body := failure(s.faultOf(r, id, err), s.opts.Service, "")
		s.write(w, status, body, id)
		return
	}
	if err := s.opts.Ready(r.Context()); err != nil {
		s.write(w, http.StatusServiceUnavailable, envelope{Error: &errorBody{Code: "SERVICE_UNAVAILABLE", Message: err.Error()}}, id)
		return
	}
	s.write(w, http.StatusOK, envelope{Data: statusResponse{"ready"}}, id)
}

// document serves /openapi.json. Web pages of other origins may read it, so that tools for OpenAPI can load it.
func (s *Server) document(w *Response, _ *http.Request) (any, error) {
	w.Header().Set("Cache-Control", "public, max-age=300")
	w.Header().Set("Access-Control-Allow-Origin", "*")
	return Verbatim{Body: io.NopCloser(bytes.NewReader(s.opts.Document))}, nil
}
