package node

import (
	"context"
	"crypto/x509"
	"errors"
	"time"

	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// storePeerKey stores the key of the connection's client certificate as the key of the host with this ID. A host that
// joined when keys were not stored yet has no stored key before the first call of storePeerKey.
func (s *Service) storePeerKey(ctx context.Context, id cloud.NodeID) error {
	leaf, err := peerCertificate(ctx)
	if err != nil || leaf == nil {
		return err
	}
	sum, err := mtls.KeyOf(leaf.PublicKey)
	if err != nil {
		return err
	}
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error { return storeKey(tx, sum, id) })
	return err
}

// caller returns the ID of the host that the client certificate of a connection names. It returns an error if there is
// no certificate, if the certificate has expired, if the host is evicted or banned, or if the host has no record.
func (s *Service) caller(ctx context.Context) (cloud.NodeID, error) {
	leaf, err := peerCertificate(ctx)
	if err != nil {
		return "", err
	}
	if leaf != nil && mtls.Expired(leaf, s.opts.Now()) {
		return "", errExpired()
	}
	return s.certifiedHost(ctx, leaf)
}

// admit returns the ID of the calling host like the method caller, and counts the call like beginCall. If err is nil,
// the caller of admit must call leave when the call ends.
func (s *Service) admit(ctx context.Context) (id cloud.NodeID, leave func(), err error) {
	if id, err = s.caller(ctx); err != nil {
		return "", nil, err
	}
	leave, err = s.beginCall(ctx, id)
	return id, leave, err
}

// certifiedHost returns the ID of the host that the certificate leaf names. It returns an error if leaf is nil or is
// not a host's certificate, if the host is evicted or banned, or if the host has no record. It does not check whether
// the certificate has expired.
func (s *Service) certifiedHost(ctx context.Context, leaf *x509.Certificate) (cloud.NodeID, error) {
	if leaf == nil {
		return "", fault.New(fault.Unauthenticated, "this call needs the certificate of a host")
	}
	id, err := mtls.IDOf(leaf)
	if err != nil || id.Kind != mtls.Node {
		return "", fault.New(fault.Unauthenticated, "this call needs the certificate of a host")
	}
	// The context of a stream has no deadline, so set one for reading the records.
	ctx, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	err = s.opts.Store.Recent(ctx, time.Second, func(v *store.View) error { return checkHost(v, cloud.NodeID(id.Name), leaf) })
	if err != nil {
		return "", err
	}
	return cloud.NodeID(id.Name), nil
}

// recordTimeout is the maximum time to read the records that are needed to authenticate one call of a host.
const recordTimeout = 5 * time.Second

// peerCertificate returns the client certificate of the connection of a call, or nil if the client presented none.
func peerCertificate(ctx context.Context) (*x509.Certificate, error) {
	p, ok := grpcpeer.FromContext(ctx)
	if !ok {
		return nil, errors.New("no connection")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return nil, nil
	}
	return info.State.PeerCertificates[0], nil
}
