package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

const clockMonotonic = 1

// report writes an event as a line, at the time of the machine's monotonic clock.
func report(kind, key, reason string) {
	var now syscall.Timespec
	syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clockMonotonic, uintptr(unsafe.Pointer(&now)), 0)
	put(line{"kind": kind, "key": key, "at_ms": now.Nano() / 1_000_000, "reason": reason})
}

func loadProducer(nameServers, prefix, stream string, isSending *atomic.Bool, period time.Duration) {
	options := []producer.Option{
		producer.WithNsResolver(primitive.NewPassthroughResolver([]string{nameServers})),
		producer.WithGroupName(prefix + "-producer-" + stream),
		producer.WithInstanceName("producer-" + stream),
	}
	if stream == "ordered" {
		options = append(options, producer.WithQueueSelector(producer.NewHashQueueSelector()))
	}
	client, err := rocketmq.NewProducer(options...)
	check(err)
	check(client.Start())
	for number := 0; isSending.Load(); number++ {
		key := fmt.Sprintf("%s-%d", stream, number)
		message := primitive.NewMessage(prefix+"-"+stream, []byte(key))
		if stream == "ordered" {
			message.WithShardingKey("one")
		}
		result, err := client.SendSync(context.Background(), message)
		switch {
		case err != nil:
			report("failed", key, err.Error())
		case result.Status != primitive.SendOK:
			report("failed", key, fmt.Sprintf("status %d", result.Status))
		default:
			report("sent", key, "")
		}
		time.Sleep(period)
	}
}

func loadConsumer(nameServers, prefix, stream string) {
	topic := prefix + "-" + stream
	client, err := rocketmq.NewPushConsumer(
		consumer.WithNsResolver(primitive.NewPassthroughResolver([]string{nameServers})),
		consumer.WithGroupName(topic),
		consumer.WithInstance("consumer-"+stream),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(stream == "ordered"),
	)
	check(err)
	take := func(
		_ context.Context, messages ...*primitive.MessageExt,
	) (consumer.ConsumeResult, error) {
		for _, message := range messages {
			report("consumed", string(message.Body), "")
		}
		return consumer.ConsumeSuccess, nil
	}
	check(client.Subscribe(topic, consumer.MessageSelector{}, take))
	check(client.Start())
}

// load is the client as an application has it: a producer and a push consumer each of a plain and of
// an ordered topic, with default settings. A line that comes in ends the sending, the end of standard
// input all.
func load(nameServers, prefix, periodMs string) {
	period, err := time.ParseDuration(periodMs + "ms")
	check(err)
	var isSending atomic.Bool
	isSending.Store(true)
	for _, stream := range []string{"plain", "ordered"} {
		loadConsumer(nameServers, prefix, stream)
		go loadProducer(nameServers, prefix, stream, &isSending, period)
	}
	for input := requests(); input.Scan(); {
		isSending.Store(false)
	}
}
