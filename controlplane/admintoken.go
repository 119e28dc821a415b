package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// adminTokenLife is the lifetime of the administrator's token in the data directory. The member replaces the token
// adminTokenRenew before it expires.
const (
	adminTokenLife  = 30 * 24 * time.Hour
	adminTokenRenew = 24 * time.Hour
)

// runAdminToken writes an administrator's token to the data directory and renews it until ctx ends. Users who can read
// the directory may use the token. The function valid returns nil if the token that it gets is valid, and an error
// otherwise. A token becomes invalid early when the administrator's password is changed.
func runAdminToken(ctx context.Context, key *clusterkey.Key, dir string, valid func(context.Context, string) error, now func() time.Time, log *slog.Logger) {
	path := filepath.Join(dir, layout.AdminTokenFile)
	for {
		if err := renewAdminToken(ctx, key, path, valid, now()); err != nil {
			log.Error("admin token", "err", err)
		}
		select {
		case <-time.After(time.Minute):
		case <-ctx.Done():
			return
		}
	}
}

// renewAdminToken writes a new token unless the old one is valid for at least another day. The age of the old token is
// the time since its file was written. If valid returns an error other than Unauthenticated, for example because there
// is no leader, the old token stays.
func renewAdminToken(ctx context.Context, key *clusterkey.Key, path string, valid func(context.Context, string) error, now time.Time) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read admin token: %w", err)
	}
	if info, err := os.Stat(path); err == nil && len(old) > 0 && now.Sub(info.ModTime()) < adminTokenLife-adminTokenRenew {
		ask, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if err := valid(ask, strings.TrimSpace(string(old))); !fault.Is(err, fault.Unauthenticated) {
			return nil
		}
	}
	token, err := identity.HostToken(key, cloud.Tenant{}, now, adminTokenLife)
	if err != nil {
		return err
	}
	if err := atomicfile.WriteFile(path, []byte(token+"\n"), 0o600); err != nil {
		return fmt.Errorf("write admin token: %w", err)
	}
	return nil
}

// tokenValidator returns a function that verifies a token with v. It returns nil if the token is valid, and the error
// of v otherwise.
func tokenValidator(v auth.Verifier) func(context.Context, string) error {
	return func(ctx context.Context, token string) error {
		_, err := v.Verify(ctx, token)
		return err
	}
}
