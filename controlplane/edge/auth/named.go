package auth

import (
	"context"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Named returns a function that looks up the ID of the object with a name, for a caller who may call method in the tenant.
func Named(method Method, find func(ctx context.Context, t cloud.Tenant, name string) (string, error)) func(context.Context, cloud.Tenant, string) (string, error) {
	return func(ctx context.Context, t cloud.Tenant, name string) (string, error) {
		t, err := Admit(ctx, method, string(t.Org), string(t.Project))
		if err != nil {
			return "", err
		}
		return find(ctx, t, name)
	}
}
