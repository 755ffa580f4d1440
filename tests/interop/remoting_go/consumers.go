package main

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

const (
	attemptsAfterTheFirst = 2
	levelOfASecond        = 1
	suspend               = 100 * time.Millisecond
	pollTime              = 500 * time.Millisecond
)

type wanted struct {
	Kind, Group, Topic, Tags, SQL string
}

func (w wanted) selector() consumer.MessageSelector {
	if w.SQL != "" {
		return consumer.MessageSelector{Type: consumer.SQL92, Expression: w.SQL}
	}
	return consumer.MessageSelector{Type: consumer.TAG, Expression: w.Tags}
}

func (w wanted) options(nameServers string) []consumer.Option {
	return []consumer.Option{
		consumer.WithNsResolver(primitive.NewPassthroughResolver([]string{nameServers})),
		consumer.WithGroupName(w.Group),
		consumer.WithInstance(w.Group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(w.Kind == "orderly"),
		consumer.WithMaxReconsumeTimes(attemptsAfterTheFirst),
		consumer.WithSuspendCurrentQueueTimeMillis(suspend),
	}
}

func (w wanted) report(message *primitive.MessageExt) {
	put(line{
		"consumer":        w.Group,
		"body":            string(message.Body),
		"topic":           message.Topic,
		"tags":            message.GetTags(),
		"keys":            message.GetKeys(),
		"origin":          message.GetProperty("origin"),
		"message_id":      message.MsgId,
		"queue_id":        message.Queue.QueueId,
		"queue_offset":    message.QueueOffset,
		"reconsume_times": message.ReconsumeTimes,
	})
}

// take reports messages; what begins with "again" is refused once, with "never" always.
func (w wanted) take(
	ctx context.Context, messages ...*primitive.MessageExt,
) (consumer.ConsumeResult, error) {
	taken := true
	for _, message := range messages {
		w.report(message)
		body := string(message.Body)
		refused := strings.HasPrefix(body, "again") && message.ReconsumeTimes == 0
		taken = taken && !refused && !strings.HasPrefix(body, "never")
	}
	if taken {
		return consumer.ConsumeSuccess, nil
	}
	if w.Kind == "orderly" {
		return consumer.SuspendCurrentQueueAMoment, nil
	}
	if concurrently, found := primitive.GetConcurrentlyCtx(ctx); found {
		concurrently.DelayLevelWhenNextConsume = levelOfASecond
	}
	return consumer.ConsumeRetryLater, nil
}

func pushed(nameServers string, w wanted) func() {
	client, err := rocketmq.NewPushConsumer(w.options(nameServers)...)
	check(err)
	check(client.Subscribe(w.Topic, w.selector(), w.take))
	check(client.Start())
	return func() { client.Shutdown() }
}

func polled(nameServers string, w wanted) func() {
	client, err := rocketmq.NewPullConsumer(w.options(nameServers)...)
	check(err)
	check(client.Subscribe(w.Topic, w.selector()))
	check(client.Start())
	var stopped atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for !stopped.Load() {
			request, err := client.Poll(context.Background(), pollTime)
			if err != nil {
				continue
			}
			for _, message := range request.GetMsgList() {
				w.report(message)
			}
			client.ACK(context.Background(), request, consumer.ConsumeSuccess)
		}
	}()
	return func() {
		stopped.Store(true)
		<-ended
		client.Shutdown()
	}
}

func consume(nameServers string, specifications []string) {
	var stops []func()
	for _, text := range specifications {
		var w wanted
		check(json.Unmarshal([]byte(text), &w))
		if w.Kind == "lite" {
			stops = append(stops, polled(nameServers, w))
		} else {
			stops = append(stops, pushed(nameServers, w))
		}
	}
	put(line{"ready": true})
	for input := requests(); input.Scan(); {
	}
	for _, stop := range stops {
		stop()
	}
}
