package identity

import (
	"net/http"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Routes adds the endpoints of the spec's part 4.6 that this version serves.
func (s *Service) Routes(r *rest.Server) {
	r.HandleOpen(http.MethodPost, "/api/v1/auth/token", s.postToken)
	r.HandleOpen(http.MethodPost, "/api/v1/auth/verify", s.postVerify)
}

type tokenBody struct {
	Username   string  `json:"username"`
	Password   string  `json:"password"`
	TTLSeconds *uint64 `json:"ttl_seconds"`
	OrgID      string  `json:"org_id"`
	ProjectID  string  `json:"project_id"`
	// The older form (the spec's part 9.4).
	PrincipalID   string `json:"principal_id"`
	PrincipalType string `json:"principal_type"`
	ScopeID       string `json:"scope_id"`
}

type tokenAnswer struct {
	Token     string `json:"token"`
	ExpiresAt string `json:"expires_at"`
}

// postToken gives a token to whoever asks, as the law says; what it is worth depends on the password.
func (s *Service) postToken(w *rest.Response, r *http.Request) (any, error) {
	w.Failure = "TOKEN_ISSUE_FAILED"
	var in tokenBody
	if _, err := rest.Decode(r, &in); err != nil {
		return nil, err
	}
	if in.Username == "" {
		in.Username = in.PrincipalID
	}
	if in.ProjectID == "" {
		in.ProjectID = in.ScopeID
	}
	if in.Username == "" {
		return nil, fault.Invalid("username", "is required")
	}
	if err := cloud.CheckCallerID("username", in.Username); err != nil {
		return nil, err
	}
	if in.PrincipalType != "" && in.PrincipalType != "user" && in.PrincipalType != "User" {
		return nil, fault.Invalid("principal_type", "only user is served")
	}
	ask := tokenRequest{User: cloud.UserID(in.Username), Password: in.Password, Address: r.RemoteAddr, Org: in.OrgID, Project: in.ProjectID}
	if in.TTLSeconds != nil {
		ask.TTL = *in.TTLSeconds
	}
	token, _, err := s.token(r.Context(), ask)
	if err != nil {
		return nil, err
	}
	return tokenAnswer{Token: token.text, ExpiresAt: token.expires.UTC().Format(time.RFC3339)}, nil
}

type verifyAnswer struct {
	Valid         bool     `json:"valid"`
	PrincipalID   *string  `json:"principal_id"`
	PrincipalName *string  `json:"principal_name"`
	Roles         []string `json:"roles"`
}

func (s *Service) postVerify(_ *rest.Response, r *http.Request) (any, error) {
	var in struct {
		Token *string `json:"token"`
	}
	if _, err := rest.Decode(r, &in); err != nil {
		return nil, err
	}
	if in.Token == nil {
		return nil, fault.Invalid("token", "is required")
	}
	caller, err := s.Verify(r.Context(), *in.Token)
	if fault.Is(err, fault.Unauthenticated) {
		return verifyAnswer{}, nil
	}
	if err != nil {
		return nil, err
	}
	id := string(caller.User)
	name := id
	// Who proved nothing learns nothing: a name that is there looks like one that is not.
	if caller.Proof != cloud.ProofNone && caller.Proof != cloud.ProofDev {
		if user, err := s.user(r.Context(), caller.User); err != nil {
			return nil, err
		} else if user != nil && user.Name != "" {
			name = user.Name
		}
	}
	answer := verifyAnswer{Valid: true, PrincipalID: &id, PrincipalName: &name, Roles: []string{}}
	for _, b := range caller.Bindings {
		if role := string(b.Role); !slices.Contains(answer.Roles, role) {
			answer.Roles = append(answer.Roles, role)
		}
	}
	slices.Sort(answer.Roles)
	return answer, nil
}
