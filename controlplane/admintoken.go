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
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	adminTokenLife  = 30 * 24 * time.Hour
	adminTokenRenew = 24 * time.Hour
)

// runAdminToken keeps a token of the administrator in the data directory, for whoever may read that. valid says whether
// one still is: a change of the administrator's password ends all that are older.
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

// renewAdminToken writes a new token unless the one that is there is valid and has more than a day to live. Its age is
// the file's. When nobody can tell, for want of a leader, it stays.
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
	fresh := path + ".new"
	if err := os.WriteFile(fresh, []byte(token+"\n"), 0o600); err != nil {
		return fmt.Errorf("write admin token: %w", err)
	}
	return os.Rename(fresh, path)
}

// tokenValidator returns a function that returns an error unless a token is valid.
func tokenValidator(v auth.Verifier) func(context.Context, string) error {
	return func(ctx context.Context, token string) error {
		_, err := v.Verify(ctx, token)
		return err
	}
}
