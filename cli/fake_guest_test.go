package main

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/emptypb"

	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"
)

// fakeGuest is a GuestService whose guests run the programs of fakePrograms.
type fakeGuest struct {
	guestv1.UnimplementedGuestServiceServer
	cloud *fakeCloud
}

// fakePrograms has the results of the programs of a fakeGuest. The program cat returns its input.
var fakePrograms = map[string]*guestv1.RunGuestCommandResponse{
	"both":   {Stdout: []byte("to stdout\n"), Stderr: []byte("to stderr\n")},
	"false":  {ExitCode: 1},
	"three":  {ExitCode: 3, Stderr: []byte("three fails\n")},
	"killed": {Signal: 9, Stdout: []byte("begun\n")},
	"much":   {Stdout: []byte("the beginning\n"), StdoutTruncated: true, StderrTruncated: true},
	"crash":  {Signal: -1073741819},
	"hex":    {ExitCode: 256},
}

func (g *fakeGuest) call(id, line string) error {
	g.cloud.mu.Lock()
	defer g.cloud.mu.Unlock()
	g.cloud.calls = append(g.cloud.calls, "  "+line)
	vm, err := g.cloud.vm(id)
	if err != nil {
		return err
	}
	if vm.GetName() == "bare" {
		return failed(codes.FailedPrecondition, "", "no guest agent runs in the guest: install the package qemu-guest-agent there and start its service")
	}
	return nil
}

func (g *fakeGuest) RunGuestCommand(_ context.Context, in *guestv1.RunGuestCommandRequest) (*guestv1.RunGuestCommandResponse, error) {
	if err := g.call(in.GetVmId(), fmt.Sprintf("run %q for %d s", in.GetCommand(), in.GetTimeoutSeconds())); err != nil {
		return nil, err
	}
	if in.GetCommand()[0] == "cat" {
		return &guestv1.RunGuestCommandResponse{Stdout: in.GetStdin()}, nil
	}
	return fakePrograms[in.GetCommand()[0]], nil
}

func (g *fakeGuest) SetGuestPassword(_ context.Context, in *guestv1.SetGuestPasswordRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, g.call(in.GetVmId(), fmt.Sprintf("password of %s as expected: %v", in.GetUsername(), in.GetPassword() == password))
}

func (g *fakeGuest) AddGuestSshKeys(_ context.Context, in *guestv1.AddGuestSshKeysRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, g.call(in.GetVmId(), fmt.Sprintf("keys of %s replace=%v:\n    %s", in.GetUsername(), in.GetReplace(), strings.Join(in.GetKeys(), "\n    ")))
}
