package main

import (
	"cmp"
	"context"

	"google.golang.org/grpc/codes"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// The calls of the fake cloud that change the names of objects of IdentityService, its service accounts and snapshots.

func (f *fakeIdentity) UpdateOrg(_ context.Context, in *identityv1.UpdateOrgRequest) (*identityv1.Org, error) {
	o, err := find(f.orgs, "org", in.GetId())
	if err == nil && in.Name != nil {
		o.Name = cmp.Or(in.GetName(), o.GetId())
	}
	return o, err
}

func (f *fakeIdentity) UpdateProject(_ context.Context, in *identityv1.UpdateProjectRequest) (*identityv1.Project, error) {
	p, err := find(f.projects, "project", in.GetId())
	if err == nil && p.GetOrgId() != in.GetOrgId() {
		return nil, failed(codes.NotFound, "", "no project %s in org %q", in.GetId(), in.GetOrgId())
	}
	if err == nil && in.Name != nil {
		p.Name = cmp.Or(in.GetName(), p.GetId())
	}
	return p, err
}

func (f *fakeIdentity) UpdateUser(_ context.Context, in *identityv1.UpdateUserRequest) (*identityv1.User, error) {
	return f.user(in.GetUserId(), func(u *identityv1.User) {
		if in.Name != nil {
			u.Name = in.GetName()
		}
	})
}

func (f *fakeIdentity) UpdateGroup(_ context.Context, in *identityv1.UpdateGroupRequest) (*identityv1.Group, error) {
	g, err := find(f.groups, "group", in.GetId())
	if err == nil && in.Name != nil {
		g.Name = cmp.Or(in.GetName(), g.GetId())
	}
	return g, err
}

func (f *fakeIdentity) GetServiceAccount(_ context.Context, in *identityv1.GetServiceAccountRequest) (*identityv1.ServiceAccount, error) {
	return find(f.accounts, "service account", in.GetId())
}

func (f *fakeIdentity) UpdateServiceAccount(_ context.Context, in *identityv1.UpdateServiceAccountRequest) (*identityv1.UpdateServiceAccountResponse, error) {
	f.note("%s", oneLine(in))
	a, err := find(f.accounts, "service account", in.GetId())
	if err != nil {
		return nil, err
	}
	if len(in.GetRoles()) > 0 {
		a.Roles = in.GetRoles()
	}
	if in.ExpiresAt != nil {
		a.ExpiresAt = in.GetExpiresAt()
	}
	out := &identityv1.UpdateServiceAccountResponse{Account: a}
	if in.GetNewSecret() {
		out.Secret = saSecret
	}
	return out, nil
}

func (f *fakeSnapshots) UpdateSnapshot(_ context.Context, in *storagev1.UpdateSnapshotRequest) (*storagev1.Snapshot, error) {
	f.cloud.mu.Lock()
	defer f.cloud.mu.Unlock()
	s, err := f.find(in.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	for _, other := range f.all {
		if other != s && other.GetName() == in.GetName() {
			return nil, failed(codes.AlreadyExists, "", "the project has a snapshot called %s", in.GetName())
		}
	}
	s.Name = cmp.Or(in.GetName(), s.GetName())
	s.Labels = cloud.Merge(s.GetLabels(), in.GetLabels())
	return s, nil
}
